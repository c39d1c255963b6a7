#!/usr/bin/env python3
"""Hidden states of a transformers model by forward hooks. Knows nothing of truetap.

Run as a program it speaks truetap's subprocess protocol:

    hf_hooks.py describe
    hf_hooks.py capture --request FILE --out DIR
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


class HookedModel:
    """A decoder-only model; ``boundary`` k is the residual stream after k blocks."""

    def __init__(self, folder, dtype):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()

    def module_of(self, boundary):
        """Return the module whose output is the boundary: block k - 1, or the embeddings for 0."""
        base = self.model.base_model
        return base.layers[boundary - 1] if boundary else base.embed_tokens

    @torch.no_grad()
    def capture(self, token_ids, boundaries):
        """Return the states, [tokens, boundaries, hidden], and log-probabilities of tokens 1 on."""
        seen = {}
        hooks = [
            self.module_of(k).register_forward_hook(lambda _m, _i, out, k=k: seen.update({k: out}))
            for k in boundaries
        ]
        ids = torch.tensor([list(token_ids)])
        logits = self.model(ids, use_cache=False).logits[0, :-1]
        for hook in hooks:
            hook.remove()
        logprobs = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return torch.stack([seen[k][0] for k in boundaries], dim=1), logprobs.tolist()


def describe():
    """Print what a certificate should be bound to, as the last line."""
    engine = {"engine": "transformers", "engine_version": transformers.__version__}
    facts = {"torch": torch.__version__}
    print(json.dumps({"format": "truetap/capture/1", **engine, "facts": facts}))


def capture(request, out):
    """Answer one request: states in one file, all else in another."""
    spec = request["spec"]
    if spec["tensor_parallel_size"] != 1 or spec["include_output"] or not spec["boundaries"]:
        print("one rank, prompts only, and not without capture", file=sys.stderr)
        sys.exit(2)  # refused
    fixed = {"kv_cache_blocks": None, "enforce_eager": True}
    for setting, only in fixed.items():
        if spec[setting] != only:
            print(f"this engine has no other {setting} than {only}", file=sys.stderr)
            sys.exit(2)
    hooked = HookedModel(spec["model"], spec["dtype"])
    states, captures = {}, []
    for i, asked in enumerate(request["requests"]):
        if len(asked["token_ids"]) >= spec["max_model_len"]:
            print(f"{asked['key']!r} is longer than max_model_len allows", file=sys.stderr)
            sys.exit(2)
        states[str(i)], logprobs = hooked.capture(asked["token_ids"], spec["boundaries"])
        echo = {"key": asked["key"], "token_ids": asked["token_ids"]}
        captures.append({**echo, "prompt_logprobs": logprobs})
    reply = {"truetap": 1, "nonce": request["nonce"], "rank": 0, "world_size": 1, "payload": {}}
    answer = {"replies": [reply], "boundaries": spec["boundaries"], "captures": captures}
    save_file(states, out / "states.safetensors")
    print(f"captured {len(captures)} prompts, call {request['nonce']}", file=sys.stderr)
    (out / "answer.json").write_text(json.dumps({"format": "truetap/capture/1", **answer}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["describe", "capture"])
    parser.add_argument("--request", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.verb == "describe":
        describe()
    else:
        capture(json.loads(options.request.read_text()), options.out)
