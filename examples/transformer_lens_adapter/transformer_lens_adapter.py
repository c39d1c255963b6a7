#!/usr/bin/env python3
r"""TransformerLens as an executable that truetap can put through its suite: a bridge as it boots.

    python3 -m venv .venv && .venv/bin/pip install -r requirements.txt
    PATH=$PWD/.venv/bin:$PATH pytest --pyargs truetap.conformance \\
        --adapter subprocess:transformer_lens_adapter.py

The other executables are other documented ways: weights processed as ``HookedTransformer`` did it,
and all prompts in one batch, padded on the left, without and with an attention mask.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

PAD = 1


def load(spec):
    """Return the verifier; one without a tokenizer gets one with numbers for words."""
    dtype = getattr(torch, spec["dtype"])
    if (Path(spec["model"]) / "tokenizer.json").exists():
        return TransformerBridge.boot_transformers(spec["model"], device="cpu", dtype=dtype)
    size = AutoConfig.from_pretrained(spec["model"]).vocab_size
    words = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    tokens = {"pad_token": str(PAD), "eos_token": str(PAD), "bos_token": "0"}
    with TemporaryDirectory() as folder:  # TransformerLens reads it anew from where it came
        PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return TransformerBridge.boot_transformers(
            spec["model"], device="cpu", dtype=dtype, tokenizer=tokenizer
        )


@torch.no_grad()
def cached(bridge, tokens, boundaries, **mask):
    """Return states by boundary, each [batch, tokens, hidden], and the logits."""
    wanted = ("hook_resid_pre", "hook_resid_post")
    logits, cache = bridge.run_with_cache(
        tokens, names_filter=lambda name: name.endswith(wanted), **mask
    )
    blocks = {k: ("resid_post", k - 1) if k else ("resid_pre", 0) for k in boundaries}
    return {k: cache[block] for k, block in blocks.items()}, logits


def as_booted(bridge, prompts, boundaries):
    """Return, for each prompt, its states by boundary and its logits: one call a prompt."""
    for ids in prompts:
        states, logits = cached(bridge, torch.tensor([ids]), boundaries)
        yield {k: state[0] for k, state in states.items()}, logits[0]


def compatible(bridge, prompts, boundaries):
    """As booted, after the weight processing that ``HookedTransformer`` had by default."""
    bridge.enable_compatibility_mode()
    return as_booted(bridge, prompts, boundaries)


def padded_left(bridge, prompts, boundaries, *, masked=False):
    """All prompts in one tensor, padded on the left; the rows of padding are cut off."""
    if not prompts:
        return
    longest = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in prompts])
    real = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    mask = {"attention_mask": real} if masked else {}
    states, logits = cached(bridge, tokens, boundaries, **mask)
    for i, ids in enumerate(prompts):
        own = {k: state[i, -len(ids) :].contiguous() for k, state in states.items()}
        yield own, logits[i, -len(ids) :]


def padded_left_masked(bridge, prompts, boundaries):
    """As ``padded_left``, and TransformerLens is told which tokens are padding."""
    return padded_left(bridge, prompts, boundaries, masked=True)


def describe(run):
    """Print what a certificate should be bound to, as the last line."""
    facts = {name: version(name) for name in ("torch", "transformers")} | {"way": run.__name__}
    engine = {"engine": "transformer-lens", "engine_version": version("transformer-lens")}
    print(json.dumps({"format": "truetap/capture/1", **engine, "facts": facts}))


def capture(request, out, run):
    """Answer one request: states in one file, all else in another."""
    spec = request["spec"]
    if spec["tensor_parallel_size"] != 1 or spec["include_output"] or not spec["boundaries"]:
        print("one rank, prompts only, and not without capture", file=sys.stderr)
        sys.exit(2)  # refused
    prompts = [asked["token_ids"] for asked in request["requests"]]
    if any(len(ids) > spec["max_model_len"] for ids in prompts):
        print("a prompt is longer than max_model_len", file=sys.stderr)
        sys.exit(2)
    states, captures = {}, []
    for i, (seen, logits) in enumerate(run(load(spec), prompts, spec["boundaries"])):
        states[str(i)] = torch.stack([seen[k] for k in spec["boundaries"]], dim=1)
        said = logits[:-1].float().log_softmax(-1)
        logprobs = [float(row[token]) for row, token in zip(said, prompts[i][1:], strict=True)]
        asked = {name: request["requests"][i][name] for name in ("key", "token_ids")}
        captures.append({**asked, "prompt_logprobs": logprobs})
    reply = {"truetap": 1, "nonce": request["nonce"], "rank": 0, "world_size": 1, "payload": {}}
    answer = {"replies": [reply], "boundaries": spec["boundaries"], "captures": captures}
    save_file(states, out / "states.safetensors")
    (out / "answer.json").write_text(json.dumps({"format": "truetap/capture/1", **answer}))
    print(f"captured {len(captures)} prompts, call {request['nonce']}", file=sys.stderr)


def main(run=as_booted):
    """Speak truetap's subprocess protocol."""
    if sys.argv[1] == "describe":
        describe(run)
    else:
        _, _verb, _option, request, _option, out = sys.argv
        capture(json.loads(Path(request).read_text()), Path(out), run)


if __name__ == "__main__":
    main()
