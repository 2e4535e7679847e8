"""Which torch tensors are taken as they are: subclasses, views that wait, wrappers."""

import importlib
import importlib.util
import pkgutil
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import qattn
import qattn.torch
from qattn.torch import sdpa

OP = torch.ops.qattn.attention.default
REFUSED = (qattn.InvalidArgument, qattn.Unsupported)
BIASES = {"upper left": causal_upper_left, "lower right": causal_lower_right}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(length=5, keys=9):
    return normal(1, 2, length, 64), normal(1, 2, keys, 64, seed=1), normal(1, 2, keys, 64, seed=2)


def biased(make, length, keys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows without keys
        return make(length, keys)


def by_sdpa(q, k, v, bias):
    return sdpa(q, k, v, attn_mask=bias, recipe="f32")


def by_operator(q, k, v, bias):
    return OP(q, k, v, bias, None, "f32")


def by_attention(q, k, v, bias):
    return qattn.attention(q, k, v, mask=bias, recipe="f32", layout="bhsd")


def by_attention_bshd(q, k, v, bias):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return qattn.attention(q, k, v, mask=bias, recipe="f32").transpose(1, 2)


WAYS = [by_sdpa, by_operator, by_attention, by_attention_bshd]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("length, keys", [(5, 9), (9, 5), (7, 7), (1, 9), (9, 1), (130, 200)])
def test_causal_biases_are_what_torch_makes_of_them(way, kind, length, keys):
    q, k, v = operands(length, keys)
    bias = biased(BIASES[kind], length, keys)
    want = torch_sdpa(q, k, v, attn_mask=bias)
    assert (way(q, k, v, bias) - want).abs().max() < 1e-5
    assert (want[:, :, 0] == 0).all() == (kind == "lower right" and length > keys)  # no keys


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BIASES)
def test_causal_biases_of_another_shape_are_refused(way, kind):
    for shape in ((1, 9), (5, 1), (5, 8), (9, 5)):
        with pytest.raises(qattn.InvalidArgument, match="mask: is a CausalBias of shape"):
            way(*operands(), biased(BIASES[kind], *shape))


@pytest.mark.parametrize("kind", BIASES)
def test_causal_biases_elsewhere(kind):
    q, k, v = operands()
    bias = BIASES[kind](5, 9)
    with pytest.raises(qattn.InvalidArgument, match="attn_mask: excludes is_causal"):
        sdpa(q, k, v, bias, is_causal=True)
    with pytest.raises(qattn.QattnError, match="attn_mask"):
        OP(q, k, v, bias, None, "f32", True)
    for name in ("query", "key", "value"):
        given = dict(query=q, key=k, value=v) | {name: bias}
        with pytest.raises(qattn.Unsupported, match=f"{name}: is a .*CausalBias"):
            sdpa(**given)
    with pytest.raises(qattn.Unsupported, match="mask: is a .*CausalBias"):
        qattn.BitMask.pack(bias)
    numbers = [x.transpose(1, 2).numpy() for x in (q, k, v)]
    got = qattn.attention(*numbers, mask=bias, recipe="f32")
    want = torch_sdpa(q, k, v, attn_mask=bias).transpose(1, 2)
    np.testing.assert_allclose(got, want.numpy(), atol=1e-5)
    packed = np.array([0, 5], np.int32), np.array([0, 9], np.int32)
    with pytest.raises(qattn.InvalidArgument, match="mask: is a CausalBias"):
        qattn.attention(
            *(x[0] for x in numbers), mask=bias, cu_seqlens_q=packed[0], cu_seqlens_k=packed[1]
        )


@pytest.mark.parametrize("kind", BIASES)
def test_causal_biases_made_inside_a_compiled_function(kind):
    def attend(q, k, v):
        return sdpa(q, k, v, BIASES[kind](5, 9), recipe="f32")

    q, k, v = operands()
    want = torch_sdpa(q, k, v, attn_mask=BIASES[kind](5, 9))
    assert (torch.compile(attend, backend="eager")(q, k, v) - want).abs().max() < 1e-5


class Trivial(torch.Tensor):
    """Changes nothing."""


class Functions(torch.Tensor):
    """Means twice its memory, which only its functions know."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """Has a tensor instead of memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("is not asked")


def calls(x):
    """(name, call) of every way in, with x in the place of one tensor; x is (1, 16, 2, 64)."""
    y = normal(1, 16, 2, 64)
    cache = qattn.KvCache(kv_heads=2, head_dim=64)
    s = cache.add_sequence()
    cache.append(0, s, y, y)
    yield "query", lambda: sdpa(x, y, y, recipe="f32")
    yield "key", lambda: sdpa(y, x, y, recipe="f32")
    yield "q", lambda: qattn.attention(x, y, y, recipe="f32")
    yield "v", lambda: qattn.attention(y, y, x, recipe="f32")
    yield "q", lambda: qattn.reference_attention(x, y, y)
    yield "x", lambda: qattn.quantize(x)
    yield "x", lambda: qattn.torch.quantize(x).codes
    yield "k", lambda: cache.append(0, s, x, y)
    yield "q", lambda: cache.decode(x, 0, s)
    yield "out", lambda: qattn.attention(y, y, y, out=x, recipe="f32")


def test_what_changes_nothing_is_taken():
    y = normal(1, 16, 2, 64)
    want = qattn.attention(y, y, y, recipe="f32")
    for x in (y.as_subclass(Trivial), torch.nn.Parameter(y), torch.nn.Buffer(y)):
        with torch.no_grad():
            assert torch.equal(torch.as_tensor(qattn.attention(x, x, x, recipe="f32")), want)
            heads = x.transpose(1, 2)
            got = sdpa(heads, heads, heads, recipe="f32").transpose(1, 2)
            assert (got.as_subclass(torch.Tensor) - want).abs().max() < 1e-6
            qattn.quantize(x)
            qattn.torch.quantize(x)


def others():
    y = normal(1, 16, 2, 64)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([normal(16, 2, 64)])
        jagged = torch.nested.nested_tensor([normal(16, 2, 64)], layout=torch.jagged)
        coded = torch.quantize_per_tensor(y, 0.1, 0, torch.qint8)
        masked = torch.masked.masked_tensor(y, y > 0)
    return {
        "functions": (y.as_subclass(Functions), "Functions"),
        "wrapper": (Wrapper(y), "Wrapper"),
        "fake": (fake, "FakeTensor"),
        "meta": (y.to("meta"), "meta"),
        "nested": (nested, "nested"),
        "jagged": (jagged, "NestedTensor"),
        "quantised": (coded, "quantised"),
        "masked": (masked, "MaskedTensor"),
        "sparse": (y.to_sparse(), "sparse_coo"),
        "mkldnn": (y.to_mkldnn(), "mkldnn"),
    }


@pytest.mark.parametrize("kind", others())
def test_others_are_refused_by_name(kind):
    x, word = others()[kind]
    for name, call in calls(x):
        with pytest.raises(REFUSED, match=f"{name}: .*{word}"):
            call()


def complex_pair():
    return torch.view_as_complex(normal(1, 16, 2, 64, 2))


LAZY = {
    "negative": (lambda: complex_pair().conj().imag, "negative"),
    "zeros": (lambda: torch._efficientzerotensor((1, 16, 2, 64)), "zeros"),
}


@pytest.mark.parametrize("kind", LAZY)
def test_lazy_tensors_are_made_or_refused(kind):
    """torch's dispatcher makes them for operators; nobody does where memory is read."""
    make, word = LAZY[kind]
    x, y = make().transpose(1, 2), normal(1, 2, 16, 64)
    real = x.clone() if kind == "zeros" else x.resolve_neg()
    for args in ((x, y, y), (y, x, y), (y, y, x)):
        made = [real if a is x else a for a in args]
        assert (sdpa(*args, recipe="f32") - sdpa(*made, recipe="f32")).abs().max() < 1e-6
    got = qattn.torch.quantize(x, layout="bhsd")
    assert torch.equal(got.codes, qattn.quantize(real.contiguous(), layout="bhsd").codes)
    for name, call in calls(make()):
        if name in ("q", "v", "k", "out"):
            with pytest.raises(qattn.InvalidArgument, match=f"{name}: .*{word}"):
                call()
    with pytest.raises(qattn.InvalidArgument, match=f"x: .*{word}"):
        qattn.quantize(make())


def test_conjugates_are_no_floats():
    for name, call in calls(complex_pair().conj()):
        with pytest.raises(REFUSED, match=name):
            call()


def test_transformations_of_torch_func():
    q, k, v = (torch.stack([x, -x]) for x in operands())
    want = torch.stack([sdpa(*x, recipe="f32") for x in zip(q, k, v)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no rule for batches: a loop
        got = torch.vmap(lambda *x: sdpa(*x, recipe="f32"))(q, k, v)
    assert torch.equal(got, want)
    rows = [x.transpose(2, 3) for x in (q, k, v)]
    with pytest.raises(qattn.Unsupported, match="q: is wrapped by a transformation"):
        torch.vmap(lambda *x: qattn.attention(*x, recipe="f32"))(*rows)
    got = torch.func.functionalize(lambda *x: sdpa(*x, recipe="f32"))(q[0], k[0], v[0])
    assert torch.equal(got, want[0])
    with pytest.raises(REFUSED, match="q: belongs to torch.func.functionalize"):
        torch.func.functionalize(lambda x: qattn.attention(x, x, x, recipe="f32"))(rows[0][0])
    with pytest.raises(qattn.InvalidArgument, match="requires a gradient"):
        torch.func.grad(lambda x: sdpa(x, k[0], v[0], recipe="f32").sum())(q[0])


def test_outputs_that_torch_func_wraps():
    """The operands are plain, memory that is made inside of it is not."""
    x = torch.randn(1, 8, 2, 64)
    qattn.attention(x, x, x)  # from here on plain tensors are known
    with pytest.raises(qattn.QattnError, match="is wrapped by a transformation of torch.func"):
        torch.func.jacrev(lambda y: qattn.attention(x, x, x).sum() * y)(torch.ones(2))


def test_tracing_takes_fake_tensors():
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in operands())
        assert sdpa(q, k, v, recipe="f32").shape == (1, 2, 5, 64)
        with pytest.raises(qattn.Unsupported, match="q: .*FakeTensor"):
            qattn.attention(q, k, v, recipe="f32", layout="bhsd")


PACKAGES = ("torch.nn", "torch.nested", "torch.masked", "torch._subclasses", "torch.sparse",
            "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp")  # fmt: skip
MODULES = ("torch.nested._internal.nested_tensor", "torch.nn.attention.bias",
           "torch.masked.maskedtensor.core", "torch.testing._internal.logging_tensor",
           "torch.testing._internal.two_tensor")  # fmt: skip


def subclasses():
    """Every subclass of torch.Tensor that torch has, as far as its modules can be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = list(MODULES)
        for package in PACKAGES:
            if importlib.util.find_spec(package) is not None:
                paths = importlib.import_module(package).__path__
                names += [m.name for m in pkgutil.iter_modules(paths, package + ".")]
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:  # what it needs is not installed
                continue
    found, ahead = {}, [torch.Tensor]
    while ahead:
        for kind in ahead.pop().__subclasses__():
            if kind.__module__.split(".")[0] == "torch" and kind not in found.values():
                found[f"{kind.__module__}.{kind.__qualname__}"] = kind
                ahead.append(kind)
    return found


def bare(kind, like):
    """An instance whose memory means nothing, made without its constructor; None: there is none."""
    for make in (
        lambda: torch.Tensor._make_subclass(kind, like),
        lambda: torch.Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype),
    ):
        try:
            made = make()
        except Exception:  # torch wants another one
            continue
        if type(made) is kind:
            return made
    return None


#: Those that are their memory.
PLAIN = {"Parameter", "Buffer", "FlatParameter"}


def test_every_subclass_of_torch():
    """Each is taken because it changes nothing, or refused by its name: none is read unasked."""
    y = normal(1, 16, 2, 64)
    taken, refused = set(), set()
    for kind in subclasses().values():
        x, name = bare(kind, y), kind.__name__
        if x is None:
            continue
        for tensor, call in (
            ("query", lambda: sdpa(x, y, y)),
            ("q", lambda: qattn.attention(x, y, y)),
            ("x", lambda: qattn.quantize(x)),
            ("x", lambda: qattn.torch.quantize(x)),
        ):
            try:
                with torch.no_grad():
                    call()
                taken.add(name)
            except REFUSED as error:
                assert str(error).startswith(tensor + ": "), (name, error)
                assert name in str(error), error
                refused.add(name)
    assert taken <= PLAIN and not taken & refused
    known = {"CausalBias", "FakeTensor", "NestedTensor", "MaskedTensor", "FunctionalTensor",
             "TwoTensor", "LoggingTensor", "SparseSemiStructuredTensor"}  # fmt: skip
    if torch.distributed.is_available():
        known |= {"DTensor", "AsyncCollectiveTensor"}
    assert known <= refused, known - refused
