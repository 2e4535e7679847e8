"""What is measured: qattn's recipes and torch's attention, as callables on one shape's tensors.

A machine makes them: Cuda, Cpu, or Emulated, which is Cuda's path with the GPU kernels in the
emulator: it serves the driver's tests and no record.
"""

import ctypes
import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

from . import provenance, timing
from .variants import plain_name

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


class Refused(Exception):
    """This candidate cannot do this shape; the text says why."""


@dataclasses.dataclass
class Candidate:
    name: str
    io: str
    steps: dict[str, Callable]  #: by name; "e2e" leaves the result in out() and comes first
    out: Callable  #: the result of the last call, (B, S, H, D)
    facts: dict = dataclasses.field(default_factory=dict)  #: for every cell
    step_facts: dict = dataclasses.field(default_factory=dict)  #: by step
    close: Callable = lambda: None


def one_line(text):
    return " ".join(str(text).split())[:500]


def empty_output(q, v):
    return q.new_full((*q.shape[:-1], v.shape[-1]), math.nan)


# ---- torch ---------------------------------------------------------------------------------------


def torch_candidate(name, io, backend, shape, tensors):
    """scaled_dot_product_attention; `backend` None: torch's choice."""
    q, k, v = (x.transpose(1, 2) for x in tensors)
    options = {"enable_gqa": shape.heads_q != shape.heads_kv, "is_causal": shape.causal}
    if shape.causal and shape.queries != shape.keys:
        # is_causal is aligned to the top left, qattn and caches to the bottom right.
        if backend == SDPBackend.CUDNN_ATTENTION:
            raise Refused("torch gives cuDNN a dense mask for causality from the bottom right")
        options |= {
            "is_causal": False,
            "attn_mask": bias.causal_lower_right(shape.queries, shape.keys),
        }
    last = []

    def call():
        if backend is None:
            out = F.scaled_dot_product_attention(q, k, v, **options)
        else:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, **options)
        last[:] = [out]

    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        raise Refused(one_line(error)) from None
    facts = {"quantises": False, "bytes_kv": shape.elements_kv() * k.element_size()}
    return Candidate(name, io, {"e2e": call}, lambda: last[0].transpose(1, 2), facts)


# ---- qattn on GPUs -------------------------------------------------------------------------------


class BenchShape(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "heads_q", "heads_kv", "tokens_q", "tokens_k")),
        *((n, ctypes.c_int64) for n in ("d", "dv")),
        *((n, ctypes.c_int32) for n in ("causal", "f16")),
    ]


class BenchStatic(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("q_scale", "k_scale", "v_scale", "k_mean")]


#: of static scales above the largest number, as qattn.diffusion.calibrate() has it
MARGIN = 1.1


def static_scales(q, k, v):
    """What "+static" takes: scales by head and K's mean, of the operands themselves."""
    mean = k.float().mean(1)  # (B, H, D)
    largest = [x.float().abs().amax((1, 3)) for x in (q, k - mean[:, None], v)]
    return [(x * (MARGIN / 127)).contiguous() for x in largest] + [mean.contiguous()]


def load_library(path):
    """libattention_bench (bench/gpu/attention_bench.cpp)."""
    lib, pointer = ctypes.CDLL(str(path)), ctypes.c_void_p
    for name, result, arguments in (
        ("error", ctypes.c_char_p, []),
        ("create", pointer, [ctypes.c_char_p, ctypes.POINTER(BenchShape)] + [pointer] * 4),
        ("static", None, [ctypes.POINTER(BenchStatic)]),
        ("kernel", ctypes.c_char_p, [pointer]),
        ("plan", ctypes.c_char_p, [pointer]),
        ("workspace", ctypes.c_int64, [pointer]),
        ("quantises", ctypes.c_int, [pointer]),
        ("kv_bytes", ctypes.c_int64, [pointer]),
        ("run", ctypes.c_int, [pointer, ctypes.c_int, pointer, pointer]),
        ("destroy", None, [pointer]),
    ):
        function = getattr(lib, f"bench_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


#: of bench_run()
STEPS = {"e2e": 0, "quantise": 1, "kernel": 2}


def steps_of(recipe, quantises):
    """Who makes codes ("+q", "+no_q", "+beside") tells in the whole; splits leave them alone."""
    aside = ("no_smooth_k", "smooth_q", "static", "static_mean")
    asked = [word for word in recipe.split("+")[1:] if word not in aside]
    if not quantises or {"q", "no_q", "beside"} & set(asked):
        return ["e2e"]
    return ["e2e", "kernel"] if asked else list(STEPS)


#: lines of a plan's text that tell which variant of a kernel runs; a plan says what applies to it
NUMBERS = re.compile(
    r"^(splits|last_splits|pack_gqa|heads_per_group|snake|consumers|shared_p|tile_keys): "
    r"(\d+)$",
    re.MULTILINE,
)
Q_CODES = re.compile(r"^q_codes: in the attention kernel$", re.MULTILINE)
BESIDE = re.compile(r"^codes: beside attention$", re.MULTILINE)
#: of the kernel that makes Q's codes, which is not the one that finds them made
Q_CODES_NUMBERS = re.compile(r"^q_codes_(shared_p|heads_per_group|snake): (\d+)$", re.MULTILINE)


def library_candidate(lib, name, recipe, io, shape, tensors, stream):
    q, k, v = tensors
    out = empty_output(q, v)
    sizes = (shape.batch, shape.heads_q, shape.heads_kv, shape.queries, shape.keys, shape.dim)
    sizes += (shape.channels_v,)
    described = BenchShape(*sizes, shape.causal, io == "f16")
    scales = static_scales(q, k, v) if "+static" in recipe else []
    if scales:
        lib.bench_static(BenchStatic(*(x.data_ptr() for x in scales)))
    handle = lib.bench_create(
        recipe.encode(), described, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    )
    if not handle:
        raise Refused(one_line(lib.bench_error().decode()))
    needed = lib.bench_workspace(handle)
    workspace = torch.empty(needed + 64, dtype=torch.uint8, device=q.device)
    address = (workspace.data_ptr() + 63) // 64 * 64

    def step(which):
        def call():
            if lib.bench_run(handle, which, address, stream()):
                raise RuntimeError(lib.bench_error().decode())

        return call

    quantises = bool(lib.bench_quantises(handle))
    plan = lib.bench_plan(handle).decode()
    kv_bytes = lib.bench_kv_bytes(handle)
    return Candidate(
        name,
        io,
        {step_name: step(STEPS[step_name]) for step_name in steps_of(recipe, quantises)},
        # The workspace and the scales live as long as the candidate does.
        lambda _=(workspace, scales): out,
        {
            "quantises": quantises,
            "kernel": lib.bench_kernel(handle).decode(),
            "bytes_workspace": needed,
        }
        | {word: int(n) for word, n in NUMBERS.findall(plan)},
        {
            "kernel": {"bytes_kv": kv_bytes},
            "e2e": {
                "bytes_kv": shape.elements_kv() * k.element_size(),
                "q_codes_in_kernel": bool(Q_CODES.search(plan)),
            }
            | ({"codes_beside": True} if BESIDE.search(plan) else {})
            | {word: int(n) for word, n in Q_CODES_NUMBERS.findall(plan)},
        },
        lambda: lib.bench_destroy(handle),
    )


class Peers:
    """Other implementations, from a Python file. It has NAMES, and make(name, q, k, v, causal) for
    bf16 tensors (B, S, H, D), on CPUs of the case's dtype, which returns ({step: call}, out): "e2e"
    first; out() has the result of the last call. It may have VERSIONS, a text. What it cannot do it
    refuses by an exception of REFUSALS."""

    REFUSALS = RuntimeError, ValueError, TypeError

    def __init__(self, path):
        self.names, self.module, self.versions = (), None, ""
        if path is None:
            return
        spec = importlib.util.spec_from_file_location("beside", path)
        if spec is None:
            raise ValueError(f"beside: {path} is no Python file")
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.names = tuple(self.module.NAMES)
        self.versions = getattr(self.module, "VERSIONS", ", ".join(self.names))

    def candidate(self, name, shape, tensors):
        try:
            steps, out = self.module.make(name, *tensors, shape.causal)
        except self.REFUSALS as error:
            raise Refused(one_line(error)) from None
        return Candidate(name, "bf16", steps, out, {"quantises": True})


def gpu_io(recipe):
    """Format of the tensors: a recipe of 16-bit products takes its own only."""
    return "f16" if plain_name(recipe) == "f16" else "bf16"


def load_builds(library, against):
    """Libraries by name, "" the one that is measured. `against`: others, as NAME=LIBRARY."""
    builds = {"": load_library(library)}
    for text in against:
        name, _, path = text.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or not path or name in builds:
            raise ValueError(f"against: {text!r} is not NAME=LIBRARY, each name once")
        builds[name] = load_library(path)
    return builds


def builds_of(recipes, builds):
    """Each recipe, and RECIPE@NAME of each other build right behind it."""
    return [f"{r}@{name}" if name else r for r in recipes for name in builds]


class Cuda:
    device = "cuda"
    torch_names = (("torch flash", SDPBackend.FLASH_ATTENTION),
                   ("torch cudnn", SDPBackend.CUDNN_ATTENTION))  # fmt: skip
    default_recipes = "bf16,f16,int8,int8_full,int8_fp8,fp8,fp8_p16"

    def __init__(self, library, against=(), beside=None):
        if not torch.cuda.is_available():
            raise ValueError("device: torch sees no CUDA device")
        if library is None:
            raise ValueError("library: --library names libattention_bench.so on GPUs")
        self.builds, self.peers = load_builds(library, against), Peers(beside)
        self.clock = timing.CudaClock(torch)

    def names(self, recipes):
        """(candidate, io) of everything that is to be measured."""
        every = builds_of(recipes, self.builds)
        others = [name for name, _ in self.torch_names] + list(self.peers.names)
        return [(name, "bf16") for name in others] + [(r, gpu_io(r)) for r in every]

    def candidate(self, name, io, shape, tensors):
        backends = dict(self.torch_names)
        if name in backends:
            return torch_candidate(name, io, backends[name], shape, tensors)
        if name in self.peers.names:
            return self.peers.candidate(name, shape, tensors)
        recipe, _, build = name.partition("@")
        build = self.builds[build]
        return library_candidate(build, name, recipe, io, shape, tensors, self.stream)

    def stream(self):
        return torch.cuda.current_stream().cuda_stream

    def synchronize(self):
        torch.cuda.synchronize()

    def facts(self):
        return provenance.gpu_facts(torch)

    def facts_at_the_end(self):
        return {}

    def sampler(self):
        return provenance.Sampler(provenance.smi_id(torch))


# ---- qattn on CPUs -------------------------------------------------------------------------------


class Cpu:
    device = "cpu"
    default_recipes = "f32,bf16,int8,int8_full"

    def __init__(self, threads):
        import qattn

        self.qattn, self.threads = qattn, threads
        torch.set_num_threads(threads)
        self.clock = timing.WallClock()

    def names(self, recipes):
        """Both formats of tensors; the f32 recipe is there to show what low precision gains."""
        found = [("torch", "f32"), ("torch", "bf16")]
        for recipe in recipes:
            ios = {"f32": ("f32",), "f16": ("f16",), "bf16": ("bf16",)}.get(recipe, ("f32", "bf16"))
            found += [(recipe, io) for io in ios]
        return found

    def candidate(self, name, io, shape, tensors):
        if name == "torch":
            return torch_candidate(name, io, None, shape, tensors)
        q, k, v = tensors
        out = empty_output(q, v)
        options = {"recipe": name, "causal": shape.causal, "threads": self.threads, "out": out}
        recipe = self.qattn.recipe(name)
        steps = {"e2e": lambda: self.qattn.attention(q, k, v, **options)}
        facts = {"quantises": recipe.qk not in DTYPES or recipe.v not in (*DTYPES, "none")}
        step_facts = {"e2e": {"bytes_kv": shape.elements_kv() * k.element_size()}}
        try:
            steps["e2e"]()
            if shape.queries == 1:  # a decode step finds its keys and values as codes
                cached = self.cached(recipe, k, v)
                if cached is not None:
                    steps["cached"] = lambda: self.qattn.attention(q, *cached, **options)
                    step_facts["cached"] = {"bytes_kv": sum(bytes_of(x) for x in cached)}
                    steps["cached"]()
        except self.qattn.QattnError as error:
            raise Refused(one_line(error)) from None
        return Candidate(name, io, steps, lambda: out, facts, step_facts)

    def cached(self, recipe, k, v):
        """K and V as codes with a scale per token; None where the recipe has no codes of both."""
        if recipe.qk != "s8" or recipe.v != "s8":
            return None
        return [
            self.qattn.quantize(x, format="s8", role=role, granularity="per_token")
            for x, role in ((k, "k"), (v, "v"))
        ]

    def synchronize(self):
        pass

    def facts(self):
        self.bandwidth = read_bandwidth(self.threads)
        return provenance.cpu_facts(torch, self.qattn, self.threads)

    def facts_at_the_end(self):
        return {"read_gb_per_s": max(self.bandwidth, read_bandwidth(self.threads))}

    def sampler(self):
        return provenance.NoSampler()


def bytes_of(quantized):
    return sum(x.numel() * x.element_size() for x in (quantized.codes, quantized.scale))


def read_bandwidth(threads, elements=1 << 27):
    """GB/s of reading float32 from memory, the best of five."""
    data = torch.ones(elements)
    clock, before = timing.WallClock(), torch.get_num_threads()
    torch.set_num_threads(threads)
    best = min(clock.milliseconds(data.max) for _ in range(5))
    torch.set_num_threads(before)
    return data.numel() * 4 / best / 1e6


class Emulated(Cuda):
    """The GPU kernels in the emulator: the driver's path without a GPU. Times mean nothing."""

    device = "cpu"
    torch_names = (("torch", None),)

    def __init__(self, library, against=(), beside=None):
        if library is None:
            raise ValueError("library: --library names libattention_bench_emulated.so")
        self.builds, self.peers = load_builds(library, against), Peers(beside)
        self.clock = timing.WallClock()

    def stream(self):
        return None

    def synchronize(self):
        pass

    def facts(self):
        return {"gpu": "emulator", "torch": torch.__version__}

    def sampler(self):
        return provenance.NoSampler()


def machine(device, library, threads, against=(), beside=None):
    if device == "cpu":
        if library is not None or against or beside:
            raise ValueError(
                "library, against, beside: CPUs are measured through the Python package"
            )
        return Cpu(threads)
    return (Cuda if device == "cuda" else Emulated)(library, against, beside)
