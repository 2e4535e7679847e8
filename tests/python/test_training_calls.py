"""What torch's operators on a GPU are asked for, with stand-ins for them on a CPU."""

import math

import pytest
import torch
from cases import nrmse
from gradients import FAR, check_far_row, errors, leaves, normal, operands, padding

from qattn.torch import _backward as _torch_backward
from qattn.torch import sdpa


def scores_of(query, key, bias, is_causal, scale):
    """In float32 beside biases."""
    scores = query.double() @ key.double().mT * scale
    scores = scores if bias is None else (scores.float() + bias.float()).double()
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def probabilities(query, key, lse, bias, is_causal, scale):
    scores = scores_of(query, key, bias, is_causal, scale)
    return torch.exp(scores - lse.double().unsqueeze(-1))


def stand_in(name):
    """What torch's operator does on a GPU, for arguments that its schema takes and its code
    demands: sizes, strides, and which side causality is of."""
    schema = getattr(torch.ops.aten, name).default._schema
    names = [x.name for x in schema.arguments]
    assert names == _torch_backward._ARGUMENTS[name].split()

    def run(*given, **named):
        assert len(given) == sum(not x.kwarg_only for x in schema.arguments)
        a = dict(zip(names, given)) | named
        query, key, value = a["query"], a["key"], a["value"]
        bias, causal, scale = a.get("attn_bias"), a["is_causal"], a["scale"]
        assert a["dropout_p"] == 0.0 and query.shape[-1] == key.shape[-1] == value.shape[-1]
        length, keys = query.shape[-2], key.shape[-2]
        if "efficient" in name:
            assert query.shape[1] == key.shape[1] == value.shape[1]
            if bias is not None:
                assert bias.shape == (*query.shape[:-1], keys) and bias.dtype == query.dtype
                assert bias.stride(3) == 1 and all(x % 8 == 0 for x in bias.stride()[:3])
        else:
            assert not causal or length == keys, "of the bottom right there"
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        if "backward" not in name:
            scores = scores_of(query, key, bias, causal, scale)
            lse = scores.logsumexp(-1)
            lse = torch.where(lse == -math.inf, 0.0, lse)  # of rows that see no key
            p = scores.softmax(-1).nan_to_num(0.0)
            out = (p @ value.double()).to(query.dtype)
            if "efficient" not in name:
                return out, lse.float()
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
            padded = torch.nn.functional.pad(lse.float(), (0, -length % 32), value=math.inf)
            return out, padded
        grad, out, lse = (a.get("grad_out", a.get("grad_out_")), a["out"], a["logsumexp"])
        if "efficient" in name:
            assert a["grad_input_mask"] == [True, True, True, False]
            assert out.transpose(1, 2).is_contiguous(), "its strides are taken for granted"
            assert lse.shape[-1] % 32 == 0 and lse.shape[-1] - length < 32
            assert (lse[..., length:] == math.inf).all()
            lse = lse[..., :length]
        else:
            assert a["cum_seq_q"] is None and (a["max_q"], a["max_k"]) == (length, keys)
            assert lse.shape == query.shape[:-1] and lse.is_contiguous()
        grad, out = grad.double(), out.double()
        p = probabilities(query, key, lse, bias, causal, scale)
        ds = p * (grad @ value.double().mT - (grad * out).sum(-1, keepdim=True)) * scale
        grads = [ds @ key.double(), ds.mT @ query.double(), p.mT @ grad]
        if a["key"].shape[1] != query.shape[1]:
            grads[1:] = (x.unflatten(1, (-1, group)).sum(2) for x in grads[1:])
        return [x.to(query.dtype) for x in grads] + [None] * ("efficient" in name)

    return run


GPU_CASES = {
    "plain": ({}, {}, "flash"),
    "causal": ({"length": 56, "kv_heads": 2}, {"is_causal": True, "enable_gqa": True}, "flash"),
    "more keys": ({"kv_heads": 2}, {"is_causal": True, "enable_gqa": True}, "flash"),
    "more queries": ({"length": 70, "kv_heads": 2}, {"is_causal": True, "enable_gqa": True},
                     "efficient"),
    "mask": ({"kv_heads": 2}, {"mask": normal(2, 4, 40, 56, seed=4) > -1, "enable_gqa": True},
             "efficient"),
    "rows without keys": ({}, {"mask": (torch.arange(40) % 3 > 0)[:, None]}, "efficient"),
    "padding": ({"dim_v": 16}, {"mask": padding()}, "efficient"),
    "bias": ({"keys": 50}, {"mask": normal(40, 1, dtype=torch.bfloat16)}, "efficient"),
}  # fmt: skip


@pytest.mark.parametrize("backward", ["forward", "16bit"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_what_gpus_are_asked_for(case, backward, monkeypatch):
    shape, options, kind = GPU_CASES[case]
    called = []

    def aten(name):
        called.append(name)
        return stand_in(name)

    monkeypatch.setattr(_torch_backward, "_on_cpu", _torch_backward._on_cuda)
    monkeypatch.setattr(_torch_backward, "_aten", aten)
    monkeypatch.setattr("qattn.torch._training.check_operators", lambda _: None)
    found = errors(operands(**shape), dtype=torch.bfloat16, backward=backward, **options)
    assert max(found) < 1.5e-2
    assert all(kind in name for name in called) and len(called) == 1 + (backward == "16bit")


@pytest.fixture
def as_on_gpus(monkeypatch):
    monkeypatch.setattr(_torch_backward, "_on_cpu", _torch_backward._on_cuda)
    monkeypatch.setattr(_torch_backward, "_aten", stand_in)


@pytest.mark.parametrize("recipe, backward", [("int8", "forward"), ("int8_full", "16bit")])
@pytest.mark.parametrize("value", FAR)
@pytest.mark.parametrize("some", [False, True])
def test_rows_under_biases_beside_which_scores_vanish(as_on_gpus, recipe, backward, value, some):
    check_far_row(value, some, recipe, backward, 1e-2)


def test_masks_with_rows_far_off(as_on_gpus):
    """Rows beside those that lie far off; biases of heads, of sequences, of queries alone."""
    far = normal(40, 56, seed=4)
    far[7:9] = -1e9
    of_heads = normal(4, 40, 56, seed=5)
    of_heads[2, 5] = torch.finfo(torch.float32).min
    of_queries = normal(40, 1, seed=4)
    of_queries[3] = -1e9
    of_sequences = normal(2, 1, 1, 56, seed=6)
    of_sequences[1] = 1e30
    for mask in (far, of_heads, of_queries, of_sequences):
        given, grad = operands(), normal(2, 4, 40, 32, seed=9)
        own = leaves(given)
        got = torch.autograd.grad(sdpa(*own, mask, recipe="int8"), own, grad)
        exact = leaves([x.double() for x in given])
        scores, lost = exact[0] @ exact[1].mT / math.sqrt(32), mask.abs() > 1e8
        # As float32 rounds them: lost in P, but not in what P depends on.
        scores = torch.where(lost, scores - scores.detach(), scores + mask)
        want = torch.autograd.grad(torch.softmax(scores, -1) @ exact[2], exact, grad.double())
        assert all(nrmse(x, y) < 1.5e-2 for x, y in zip(got, want, strict=True))


def test_rows_whose_gradient_is_nan(as_on_gpus):
    """Scores neither vanish beside -1e7 nor keep their digits: NaN, unless nothing is asked for."""
    given = operands()
    mask = torch.zeros(40, 56)
    mask[7], mask[9] = -1e7, torch.finfo(torch.float16).min
    own = leaves(given)
    out = sdpa(*own, mask, recipe="int8")
    grad = normal(*out.shape, seed=9)
    got = torch.autograd.grad(out, own, grad, retain_graph=True)[0]
    assert torch.isnan(got[:, :, 7]).all() and torch.isfinite(got[:, :, 8:]).all()
    grad[:, :, 7] = 0
    got = torch.autograd.grad(out, own, grad)
    assert all(torch.isfinite(x).all() for x in got) and (got[0][:, :, 7] == 0).all()
    loud = [given[0] * 40, *given[1:]]  # scores beyond 32, which -1e9 does not swallow
    mask[7] = -1e9
    own = leaves(loud)
    got = torch.autograd.grad(sdpa(*own, mask, recipe="int8").sum(), own)
    assert torch.isnan(got[0][:, :, 7]).all()
