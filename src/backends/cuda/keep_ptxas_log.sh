#!/bin/sh
# keep_ptxas_log.sh NVCC ARGUMENTS...: runs the compiler with ptxas' report of registers, stacks and
# spills, which goes to OBJECT.ptxas; everything else that it says stays on the terminal.
object=
for argument in "$@"; do
  [ "$before" = -o ] && object=$argument
  before=$argument
done
case $object in
  *.o) ;;
  *) exec "$@" ;;
esac
"$@" -Xptxas=-v 2>"$object.ptxas"
status=$?
grep -vE '^ptxas info |^ +[0-9]+ bytes stack frame|^$' "$object.ptxas" >&2
exit $status
