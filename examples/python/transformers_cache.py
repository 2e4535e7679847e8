"""generate() of a transformers model with QattnCache: keys and values in 4 bits on average, and
their memory beside that of the default cache.

Run it with qattn and transformers installed: python transformers_cache.py
The model here is tiny and random, so that nothing is downloaded; from_pretrained() takes
attn_implementation="qattn" in the same way.
"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import qattn.transformers


def main() -> None:
    qattn.transformers.register(recipe="bf16")  # what prompts are attended with
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        attn_implementation="qattn", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.randint(0, 256, (1, 1000))
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": mask}

    plain = DynamicCache(config=config)
    want = model.generate(prompt, past_key_values=plain, **options)
    plain_bytes = sum(
        x.numel() * x.element_size() for layer in plain.layers for x in (layer.keys, layer.values)
    )

    # A window in 16 bits, and tiers of 8, 4, 3 and 2 bits so that everything has 4.5 on average.
    cache = qattn.transformers.QattnCache(
        config, average_bits=4.5, window=64, sinks=16, budget_from=1000
    )
    got = model.generate(prompt, past_key_values=cache, **options)
    use = [cache.kv.usage(cache.sequences[0], layer) for layer in range(config.num_hidden_layers)]
    qattn_bytes = sum(layer.bytes for layer in use)

    same = (got == want).float().mean().item()
    print(f"default cache: {plain_bytes / 2**10:.0f} KiB for {plain.get_seq_length()} tokens")
    print(
        f"QattnCache:    {qattn_bytes / 2**10:.0f} KiB, {use[0].average_bits:.2f} bits an element; "
        f"tokens by tier {use[0].tier_tokens}, {use[0].window_tokens} in 16 bits"
    )
    print(f"{same:.0%} of the tokens are those of the default cache (random weights)")
    assert qattn_bytes < 0.35 * plain_bytes
    assert cache.get_seq_length() == plain.get_seq_length()


if __name__ == "__main__":
    main()
