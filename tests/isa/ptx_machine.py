"""Executes the PTX of a kernel, so much of it as Triton's small kernels use.

All threads of a block run in step, one instruction after the other, so that barriers have nothing
to do and branches must be taken by all or by none. A register is an array of 64 bits a thread.
Products, matrix loads and stores and conversions to narrow floats are the emulator's words
(emulator_words.py), for whose sake kernels are executed; the rest is numpy.
"""

import re

import numpy as np

# What else a name may say where numpy has no choice of it. Those of other instructions are looked
# at.
MODIFIERS = {
    "add": {"rn"}, "sub": {"rn"}, "mul": {"rn", "lo", "wide"}, "mad": {"lo", "wide"}, "fma": {"rn"},
    "div": {"full", "rn"}, "ex2": {"approx", "ftz"},
    "ld": {"param", "global", "shared", "v2", "v4"},
    "st": {"global", "shared", "v2", "v4"}, "shfl": {"sync", "bfly", "idx"},
    "setp": {"eq", "ne", "lt", "le", "gt", "ge"}, "and": {"pred"}, "or": {"pred"},
    "xor": {"pred"}, "not": {"pred"}, "mov": {"pred"},
}  # fmt: skip
LOOKED_AT = {"mma", "ldmatrix", "stmatrix", "cvt"}
TYPE = r"[bsuf](8|16|32|64)(x2)?"
KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def dtype(name):
    """numpy's type of PTX's `s32`; f32x2 is two floats in 64 bits."""
    if name == "f32x2":
        return np.dtype(np.uint64)
    return np.dtype(f"{KINDS[name[0]]}{int(name[1:]) // 8}")


# ---- Text ----------------------------------------------------------------------------------------


class Instruction:
    def __init__(self, text):
        self.text = " ".join(text.split())
        self.unless, self.predicate = None, None
        guard = re.match(r"@(!?)(%?[\w$]+)\s+(.*)", self.text)
        rest = self.text
        if guard:
            self.unless, self.predicate, rest = guard[1] == "!", guard[2], guard[3]
        name, _, operands = rest.partition(" ")
        self.name, self.parts = name, name.split(".")
        self.operands = [o.strip() for o in re.split(r",(?![^{\[]*[}\]])", operands) if o.strip()]

    def type(self, last=1):
        """The last type of the name, or the one before it."""
        types = [p for p in self.parts if re.fullmatch(TYPE, p)]
        return types[-last]


def vector(operand):
    """`{%r1, %r2}` as its registers; another operand alone."""
    return [x.strip() for x in operand.strip("{} ").split(",")]


class Program:
    """The first kernel of a PTX text: instructions, labels, parameters."""

    def __init__(self, ptx):
        ptx = re.sub(r"//[^\n]*", "", ptx)
        ptx = re.sub(r"^\s*\.(loc|file|section)\b[^\n]*", "", ptx, flags=re.M)
        entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{(.*)\}", ptx, re.S)
        self.parameters = re.findall(r"(\w+_param_\d+)", entry[2])
        self.threads = int(re.search(r"\.reqntid\s+(\d+)", entry[3])[1])
        self.instructions, self.labels = [], {}
        self._scopes = [{}]
        text = ""
        for token in re.findall(r"[{};]|[^{};]+", entry[4]):
            if token == "{" and not self._labelled(text):
                self._scopes.append({})
                text = ""
            elif token == "}" and not self._labelled(text):
                self._scopes.pop()
                text = ""
            elif token == ";":
                self._statement(self._labelled(text))
                text = ""
            else:
                text += token
        assert len(self._scopes) == 1

    def _labelled(self, text):
        """What follows the labels at its begin, which are noted."""
        while label := re.match(r"\s*([\w$]+):(?!:)", text):
            self.labels[label[1]] = len(self.instructions)
            text = text[label.end() :]
        return text.strip()

    def _statement(self, text):
        if declared := re.match(r"\.reg\s+\.\w+\s+(.*)", text, re.S):
            if len(self._scopes) > 1:  # names of an inner scope hide others
                number = len(self.instructions)
                for name in declared[1].split(","):
                    self._scopes[-1][name.strip()] = f"{name.strip()}@{number}"
        elif text and not text.startswith("."):
            for scope in reversed(self._scopes[1:]):
                for name, unique in scope.items():
                    text = re.sub(rf"(?<![\w%$.@]){re.escape(name)}(?![\w@.])", unique, text)
            self.instructions.append(Instruction(text))


# ---- Memory --------------------------------------------------------------------------------------


class Memory:
    """Bytes at addresses from `base` on. What nobody wrote or gave may not be read."""

    def __init__(self, base, size):
        self.base, self.bytes = base, np.zeros(size, np.uint8)
        self.known = np.zeros(size, bool)
        self.writable = np.ones(size, bool)

    def places(self, addresses, count, what):
        at = addresses.astype(np.int64) - self.base
        assert not (at % min(count, 16)).any(), f"{what}: an address is no multiple of {count}"
        assert at.min() >= 0 and at.max() + count <= len(self.bytes), f"{what} out of bounds"
        return at[:, None] + np.arange(count)

    def load(self, addresses, count, what):
        at = self.places(addresses, count, what)
        assert self.known[at].all(), f"{what} of bytes that nobody wrote"
        return self.bytes[at]

    def store(self, addresses, values, what):
        at = self.places(addresses, values.shape[1], what)
        assert self.writable[at].all(), f"{what} out of bounds"
        self.bytes[at], self.known[at] = values, True


class Arguments:
    """Arrays side by side in one global memory, with gaps between them."""

    def __init__(self, values, gap=256):
        self.arrays, size = [], gap
        self.values = []
        for value in values:
            if isinstance(value, np.ndarray):
                self.arrays.append((size, value))
                self.values.append(size + gap)
                size += -(-value.nbytes // gap) * gap + gap
            else:
                self.values.append(value)
        self.memory = Memory(gap, size)
        self.memory.writable[:] = False
        for at, value in self.arrays:
            place = slice(at, at + value.nbytes)
            self.memory.bytes[place] = value.reshape(-1).view(np.uint8)
            self.memory.known[place] = self.memory.writable[place] = True

    def take_back(self):
        for at, value in self.arrays:
            value.reshape(-1).view(np.uint8)[:] = self.memory.bytes[at : at + value.nbytes]


# ---- Execution -----------------------------------------------------------------------------------


class Machine:
    """One block of a kernel."""

    def __init__(self, ptx, words, shared_bytes):
        self.program, self.words = Program(ptx), words
        self.shared = Memory(0, shared_bytes)
        self.thread = np.arange(self.program.threads)

    def run(self, *values):
        """Pointers are arrays, whose contents the kernel changes; others are numbers. Parameters
        beyond them, scratch that small kernels do not use, are null."""
        arguments = Arguments(values)
        self.memory = arguments.memory
        names = self.program.parameters
        self.parameters = dict(zip(names, arguments.values + [0] * len(names)))
        self.registers = {}
        at = 0
        while at < len(self.program.instructions):
            at = self._step(self.program.instructions[at], at)
        arguments.take_back()

    def _step(self, instruction, at):
        self.active = np.ones(len(self.thread), bool)
        if instruction.predicate:
            self.active = self.registers[instruction.predicate].astype(bool) ^ instruction.unless
        opcode = instruction.parts[0]
        if opcode in ("ret", "bra"):
            assert self.active.all() or not self.active.any(), "threads part: " + instruction.text
            if not self.active.any():
                return at + 1
            if opcode == "ret":
                return len(self.program.instructions)
            return self.program.labels[instruction.operands[0]]
        if opcode in ("bar", "barrier"):
            return at + 1
        try:
            run = getattr(self, "_" + opcode, None)
            known = MODIFIERS.get(opcode, set())
            for part in instruction.parts[1:]:
                known_part = part in known or opcode in LOOKED_AT or re.fullmatch(TYPE, part)
                assert known_part, f"unknown .{part}"
            assert run, "unknown instruction"
            run(instruction)
        except Exception as error:
            raise RuntimeError(f"{instruction.text}: {error!r}") from error
        return at + 1

    # -- registers --

    def _read(self, operand, type_name):
        """The operand's values, of numpy's type for `type_name`."""
        to = dtype(type_name)
        if operand in self.registers:
            raw = self.registers[operand]
        elif operand == "%tid.x":
            raw = self.thread.astype(np.uint64)
        elif operand.startswith("%ctaid") or operand in ("%tid.y", "%tid.z", "global_smem"):
            raw = np.zeros(len(self.thread), np.uint64)
        else:
            text = operand.rstrip("U")
            number = int(text[2:], 16) if text.startswith("0f") else int(text, 0)
            raw = np.full(len(self.thread), number & (2**64 - 1), np.uint64)
        return raw.astype(np.dtype(f"u{to.itemsize}")).view(to)

    def _write(self, operand, values):
        if operand == "_":
            return
        values = np.broadcast_to(values, self.thread.shape)
        raw = np.ascontiguousarray(values)
        raw = raw.view(np.dtype(f"u{raw.itemsize}")).astype(np.uint64)
        if not self.active.all():
            raw = np.where(self.active, raw, self.registers.get(operand, np.uint64(0)))
        self.registers[operand] = raw

    def _sources(self, i, type_name=None):
        return [self._read(o, type_name or i.type()) for o in i.operands[1:]]

    def _read_vector(self, operand, type_name="b32"):
        return np.stack([self._read(r, type_name) for r in vector(operand)], axis=1)

    def _write_vector(self, operand, values):
        for n, register in enumerate(vector(operand)):
            self._write(register, values[:, n])

    # -- memory --

    def _addresses(self, operand, kind):
        base, _, offset = operand.strip("[] ").partition("+")
        addresses = self._read(base.strip(), kind).astype(np.int64)
        return addresses + (int(offset, 0) if offset.strip() else 0)

    def _space(self, i):
        if "shared" in i.parts or "shared::cta" in i.parts:
            return self.shared, "b32"
        assert "global" in i.parts, "unknown memory"
        return self.memory, "b64"

    def _ld(self, i):
        if "param" in i.parts:
            value = self.parameters[i.operands[1].strip("[] ")]
            if isinstance(value, float):
                value = int(np.float32(value).view(np.uint32))
            return self._write(i.operands[0], np.full(len(self.thread), value, np.uint64))
        memory, pointer = self._space(i)
        size, registers = dtype(i.type()).itemsize, vector(i.operands[0])
        addresses = self._addresses(i.operands[1], pointer)[self.active]
        count = size * len(registers)
        data = np.zeros((len(self.thread), count), np.uint8)
        if self.active.any():
            data[self.active] = memory.load(addresses, count, "load")
        self._write_vector(i.operands[0], data.view(np.dtype(f"u{size}")))

    def _st(self, i):
        memory, pointer = self._space(i)
        data = self._read_vector(i.operands[1], i.type())
        data = np.ascontiguousarray(data).view(np.uint8)[self.active]
        addresses = self._addresses(i.operands[0], pointer)[self.active]
        if self.active.any():
            memory.store(addresses, data, "store")

    def _matrix_kind(self, i):
        """The word's kind, and how many lanes give the address of a row of 16 bytes."""
        if "b8" in i.parts:
            assert i.parts[3:] == ["m16n16", "x2", "trans", "shared", "b8"], "unknown matrices"
            return "b8.trans", 32
        number = next(p for p in i.parts if p in ("x1", "x2", "x4"))
        return number + (".trans" if "trans" in i.parts else ""), 8 * int(number[1])

    def _ldmatrix(self, i):
        kind, lanes = self._matrix_kind(i)
        gives = self.thread % 32 < lanes
        rows = np.zeros((len(self.thread), 16), np.uint8)
        rows[gives] = self.shared.load(self._addresses(i.operands[1], "b32")[gives], 16, "ldmatrix")
        self._write_vector(i.operands[0], self.words.load_matrix(kind, rows))

    def _stmatrix(self, i):
        kind, lanes = self._matrix_kind(i)
        gives = self.thread % 32 < lanes
        rows = np.zeros((len(self.thread), 16), np.uint8)
        rows = self.words.store_matrix(kind, rows, self._read_vector(i.operands[1]))
        addresses = self._addresses(i.operands[0], "b32")[gives]
        self.shared.store(addresses, rows[gives], "stmatrix")

    # -- products --

    def _mma(self, i):
        assert self.active.all()
        d, a, b, c = (self._read_vector(o) for o in i.operands[:4])
        # .satfinite of integers is passed over: sums are far from their limits here.
        kind = re.search(r"(?:f32|s32)\.(\w+\.\w+)\.(?:f32|s32)", i.name)[1]
        scales = []
        if "block_scale" in i.parts:
            byte = self._selected(i.operands[5])
            assert byte == self._selected(i.operands[7])
            scales = [self._read(i.operands[n], "b32") for n in (4, 6)]
            types = (kind, i.parts[-1])
            kind = {
                ("e4m3.e4m3", "ue8m0"): "mxfp8",
                ("e2m1.e2m1", "ue8m0"): "mxfp4",
                ("e2m1.e2m1", "ue4m3"): "nvfp4",
            }[types]
            kind = f"{kind} {byte}"
        elif "kind::f8f6f4" in i.parts:
            kind = "f8f6f4 " + kind
        self._write_vector(i.operands[0], self.words.mma(kind, c, a, b, *scales))

    def _selected(self, operand):
        """The byte of the scales; the word knows the first lanes of four alone."""
        byte, thread = (int(x, 0) for x in vector(operand))
        assert thread == 0, "scales of other lanes"
        return byte

    # -- moves, conversions --

    def _mov(self, i):
        size = 1 if i.parts[1] == "pred" else dtype(i.type()).itemsize
        to, source = i.operands
        if to.startswith("{"):
            values = np.ascontiguousarray(self._read(source, i.type()))
            parts = values.view(np.dtype(f"u{size // len(vector(to))}"))
            return self._write_vector(to, parts.reshape(len(self.thread), -1))
        if source.startswith("{"):
            part = 8 * size // len(vector(source))
            values = np.ascontiguousarray(self._read_vector(source, f"b{part}"))
            return self._write(to, values.view(np.dtype(f"u{size}"))[:, 0])
        self._write(to, self._read(source, f"b{8 * size}"))

    def _cvt(self, i):
        narrow = next((p for p in i.parts if p.endswith("x2") and p != "f32x2"), None)
        if narrow:
            high, low = (self._read(o, "f32") for o in i.operands[1:])
            rounding = i.parts[1] + "." if narrow == "ue8m0x2" else ""
            codes = self.words.convert(rounding + narrow, low, high)
            small = narrow not in ("bf16x2", "f16x2")
            return self._write(i.operands[0], codes.astype(np.uint16) if small else codes)
        assert len(i.parts) == 3 or i.parts[1] == "rn" and len(i.parts) == 4, "unknown conversion"
        to, source = dtype(i.type(2)), self._read(i.operands[1], i.type())
        assert to.kind == "f" or source.dtype.kind != "f", "unknown conversion"
        self._write(i.operands[0], source.astype(to))

    # -- arithmetic --

    def _arithmetic(self, i, operation):
        if i.type() == "f32x2":
            values = [v.view(np.float32).reshape(-1, 2) for v in self._sources(i)]
            result = np.ascontiguousarray(operation(*values).astype(np.float32))
            return self._write(i.operands[0], result.view(np.uint64)[:, 0])
        with np.errstate(all="ignore"):
            self._write(i.operands[0], operation(*self._sources(i)))

    def _add(self, i):
        self._arithmetic(i, np.add)

    def _sub(self, i):
        self._arithmetic(i, np.subtract)

    def _neg(self, i):
        self._arithmetic(i, np.negative)

    def _max(self, i):
        self._arithmetic(i, lambda *v: np.fmax.reduce(v))

    def _min(self, i):
        self._arithmetic(i, lambda *v: np.fmin.reduce(v))

    def _div(self, i):
        self._arithmetic(i, np.divide)

    def _ex2(self, i):
        self._write(i.operands[0], self.words.exp2(self._sources(i, "f32")[0]))

    def _mul(self, i):
        if "wide" in i.parts:
            a, b = self._wide(i)[:2]
            return self._write(i.operands[0], a * b)
        self._arithmetic(i, np.multiply)

    def _mad(self, i):
        if "wide" in i.parts:
            a, b, c = self._wide(i)
            return self._write(i.operands[0], a * b + c)
        self._arithmetic(i, lambda a, b, c: a * b + c)

    def _wide(self, i):
        """Factors of twice their width, and what is added to their product."""
        kind, bits = i.type()[0], int(i.type()[1:])
        narrow = [self._read(o, i.type()) for o in i.operands[1:3]]
        wide = dtype(f"{kind}{2 * bits}")
        return [x.astype(wide) for x in narrow] + [
            self._read(o, f"{kind}{2 * bits}") for o in i.operands[3:]
        ]

    def _fma(self, i):
        # 48 bits of product are exact; the sum is rounded to 53 bits before it is to 24.
        def operation(a, b, c):
            wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
            return wide.astype(np.float32)

        self._arithmetic(i, operation)

    # -- bits, predicates --

    def _logic(self, i, operation):
        name = "b8" if i.parts[-1] == "pred" else i.type()
        self._write(i.operands[0], operation(*self._sources(i, name)))

    def _and(self, i):
        self._logic(i, np.bitwise_and)

    def _or(self, i):
        self._logic(i, np.bitwise_or)

    def _xor(self, i):
        self._logic(i, np.bitwise_xor)

    def _not(self, i):
        self._logic(i, np.logical_not if i.parts[-1] == "pred" else np.bitwise_not)

    def _shift(self, i, operation):
        values, by = self._read(i.operands[1], i.type()), self._read(i.operands[2], "u32")
        bits = 8 * values.itemsize
        zero = (values >> (bits - 1)) if values.dtype.kind == "i" else np.zeros_like(values)
        shifted = operation(values, np.minimum(by, bits - 1).astype(values.dtype))
        self._write(i.operands[0], np.where(by < bits, shifted, zero))

    def _shl(self, i):
        self._shift(i, np.left_shift)

    def _shr(self, i):
        self._shift(i, np.right_shift)

    def _bfe(self, i):
        values = self._read(i.operands[1], i.type())
        first, count = (int(o, 0) for o in i.operands[2:])
        unused = 8 * values.itemsize - count
        self._write(i.operands[0], values << (unused - first) >> unused)

    def _bfi(self, i):
        source, into = (self._read(o, i.type()) for o in i.operands[1:3])
        first, count = (int(o, 0) for o in i.operands[3:])
        mask = into.dtype.type(((1 << count) - 1) << first)
        self._write(i.operands[0], into & ~mask | (source << first) & mask)

    def _prmt(self, i):
        a, b, selector = self._sources(i, "b32")
        both = np.stack([a, b], axis=1).view(np.uint8)
        result = np.zeros((len(self.thread), 4), np.uint8)
        for n in range(4):
            nibble = (selector >> np.uint32(4 * n)) & 15
            byte = both[self.thread, nibble & 7]
            result[:, n] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
        self._write(i.operands[0], result.view(np.uint32)[:, 0])

    def _setp(self, i):
        compare = {
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
            "gt": np.greater, "ge": np.greater_equal,
        }[i.parts[1]]  # fmt: skip
        self._write(i.operands[0], compare(*self._sources(i)))

    def _selp(self, i):
        a, b = (self._read(o, i.type()) for o in i.operands[1:3])
        self._write(i.operands[0], np.where(self.registers[i.operands[3]].astype(bool), a, b))

    def _shfl(self, i):
        value, lane = (self._read(o, "b32") for o in i.operands[1:3])
        assert int(i.operands[3], 0) == 31 and self.active.all(), "unknown shuffle"
        mine = self.thread % 32
        source = mine ^ lane if "bfly" in i.parts else lane
        assert "bfly" in i.parts or "idx" in i.parts, "unknown shuffle"
        self._write(i.operands[0], value[self.thread - mine + source % 32])
