# sh time_step.sh LOG KIND command...: runs the command and adds a line to LOG: the kind, when it
# began and ended, and the CPU time it took. tools/tier.py adds them up.
log=$1 kind=$2
shift 2
begin=$(date +%s.%N)
"$@"
status=$?
# What children took is the second line, as 1m2.34s 0m0.56s; of a subshell it would be nothing.
times >"$log.$$"
{ read -r own; read -r children; } <"$log.$$"
rm -f "$log.$$"
echo "$kind $begin $(date +%s.%N) $children" >>"$log"
exit $status
