#!/usr/bin/env python3
r"""nnsight as an executable that truetap can put through its suite: one prompt a trace.

    python3 -m venv .venv && .venv/bin/pip install -r requirements.txt
    PATH=$PWD/.venv/bin:$PATH pytest --pyargs truetap.conformance \\
        --adapter subprocess:nnsight_adapter.py

``nnsight_batched.py`` and ``nnsight_batched_cut.py`` are the same with all prompts in one trace.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import nnsight
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast


def load(spec):
    """Return the verifier; one without a tokenizer gets numbers for words, to pad batches with."""
    settings = {}
    if not (Path(spec["model"]) / "tokenizer.json").exists():
        size = AutoConfig.from_pretrained(spec["model"]).vocab_size
        words = models.WordLevel({str(i): i for i in range(size)}, unk_token="0")
        settings["tokenizer"] = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words), pad_token="1"
        )
    dtype = getattr(torch, spec["dtype"])
    return nnsight.TransformersModel(
        spec["model"], task="text-generation", dtype=dtype, dispatch=True, **settings
    )


def outputs(model, boundaries):
    """Inside a trace: the states by boundary, read in the order of the forward pass."""
    base = model.model
    return {k: (base.layers[k - 1] if k else base.embed_tokens).output for k in sorted(boundaries)}


@torch.no_grad()
def one_by_one(model, prompts, boundaries):
    """Return, for each prompt, its states by boundary and its logits: one trace a prompt."""
    answers = []
    for ids in prompts:
        with model.trace(torch.tensor([ids])):
            states = nnsight.save(outputs(model, set(boundaries)))
            logits = model.output.logits.save()
        answers.append(({k: state[0] for k, state in states.items()}, logits[0]))
    return answers


@torch.no_grad()
def batched(model, prompts, boundaries):
    """All prompts in one trace, an ``invoke`` each, which sees its own rows of the batch."""
    if not prompts:
        return []
    with model.trace() as tracer:
        answers = nnsight.save([])
        for ids in prompts:
            with tracer.invoke(torch.tensor([ids])):
                states = outputs(model, set(boundaries))
                answers.append(
                    ({k: state[0] for k, state in states.items()}, model.output.logits[0])
                )
    return answers


def batched_cut(model, prompts, boundaries):
    """As ``batched``, with the rows of padding cut off: they come first, as nnsight pads left."""
    return [
        ({k: state[-len(ids) :] for k, state in states.items()}, logits[-len(ids) :])
        for ids, (states, logits) in zip(prompts, batched(model, prompts, boundaries), strict=True)
    ]


def describe(run):
    """Print what a certificate should be bound to, as the last line."""
    facts = {name: version(name) for name in ("torch", "transformers")} | {"way": run.__name__}
    engine = {"engine": "nnsight", "engine_version": version("nnsight"), "facts": facts}
    print(json.dumps({"format": "truetap/capture/1", **engine}))


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
        said = logits[:-1].float().log_softmax(-1)[-len(prompts[i]) + 1 :] if prompts[i][1:] else []
        logprobs = [float(row[token]) for row, token in zip(said, prompts[i][1:], strict=True)]
        asked = {name: request["requests"][i][name] for name in ("key", "token_ids")}
        captures.append({**asked, "prompt_logprobs": logprobs})
    reply = {"truetap": 1, "nonce": request["nonce"], "rank": 0, "world_size": 1, "payload": {}}
    answer = {"replies": [reply], "boundaries": spec["boundaries"], "captures": captures}
    save_file(states, out / "states.safetensors")
    (out / "answer.json").write_text(json.dumps({"format": "truetap/capture/1", **answer}))
    print(f"captured {len(captures)} prompts, call {request['nonce']}", file=sys.stderr)


def main(run=one_by_one):
    """Speak truetap's subprocess protocol."""
    if sys.argv[1] == "describe":
        describe(run)
    else:
        _, _verb, _option, request, _option, out = sys.argv
        capture(json.loads(Path(request).read_text()), Path(out), run)


if __name__ == "__main__":
    main()
