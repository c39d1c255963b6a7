"""The ``truetap`` hidden-states backend of speculators: its own trainer, fed by verified shards.

Importing this module registers it; that must happen before ``speculators.train`` is imported, which
``python -m truetap.pipeline.speculators_train`` sees to. Before the first step the chain of every
shard to its certificate is followed, and each row of the dataset must have states of its very
tokens. A shard's bytes are compared with their digests when a process first reads from it, and
again whenever its file has changed. What does not hold ends the training; nothing is skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import boundaries, verifier
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.pipeline import audit_log, policy, provenance, run_folder, uncertified
from truetap.pipeline.arrow_dataset import POINTER
from truetap.pipeline.batches import fault_of
from truetap.pipeline.config import Gate
from truetap.pipeline.provenance import Provenance
from truetap.pipeline.store import Sample, Store

try:
    from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
except ImportError as error:
    raise CouldNotRun(
        f"speculators' trainer cannot be reached: {error}", remedy="pip install 'truetap[train]'"
    ) from error

if TYPE_CHECKING:
    import torch

NAME = "truetap"
Place = tuple[str, int]
"""A shard, and which of its requests."""


class VerifiedTransfer(HiddenStatesTransfer):
    """Gives the states of a dataset's rows, out of shards that verify.

    ``rows[i]`` is where the states of row i are. Pickled to the trainer's loading processes, each
    of which verifies what it reads.
    """

    def __init__(
        self, shards: Path, entries: Mapping[str, Mapping[str, Any]], rows: Sequence[Place]
    ) -> None:
        self._store, self._entries, self._rows = Store(shards), dict(entries), list(rows)
        self._open: dict[str, tuple[tuple[int, ...], dict[str, torch.Tensor]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """Return ``hidden_states`` ``[T, boundaries, hidden]`` and ``token_ids`` ``[T]`` of a row.

        Never None, which the trainer would take for "ask an engine" or "leave it out".
        """
        name, index = self._rows[file_idx]
        tensors = self._verified(name)
        rows = slice(*tensors["offsets"][index : index + 2].tolist())
        sample = Sample(
            self._entries[name]["ids"][index],
            tensors["token_ids"][rows],
            tensors["loss_mask"][rows],
            tensors["states"][rows],
        )
        if wrong := fault_of(sample):
            raise CheckFailed(
                f"the states of {sample.id!r} (row {file_idx}) must not be trained on: {wrong}",
                remedy="run truetap export-dataset again: it leaves such conversations out",
            )
        return {"hidden_states": sample.states, "token_ids": sample.token_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Refuse: states that an engine has just made are certified by nothing."""
        raise UsageError(
            f"the {NAME} backend takes no states from a running engine ({len(hs_transfer_params)} "
            "parameters were offered)",
            remedy="capture with truetap extract",
        )

    def _verified(self, name: str) -> dict[str, torch.Tensor]:
        path = self._store.path(name)
        try:
            status = path.lstat()
        except FileNotFoundError:
            raise IntegrityError(f"shard {path} is missing") from None
        # The time of the last change of the file itself is the one that no program can set back.
        signature = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._open.get(name)
        if known is None or known[0] != signature:
            known = signature, self._store.verified(self._entries[name])
            self._open[name] = known
        return known[1]


@HiddenStatesBackend.register(NAME)
class TruetapBackend(HiddenStatesBackend):
    """``--hidden-states-backend truetap``."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add this backend's options to the trainer's."""
        parser.add_argument(
            "--truetap-shards",
            default=None,
            help="Shards of a truetap run. Default: those the dataset was exported with.",
        )
        parser.add_argument(
            "--truetap-policy",
            default=None,
            help="What to demand of the shards' certificates (TOML). Default: that of development.",
        )
        parser.add_argument(
            "--truetap-allow-uncertified",
            default=None,
            help="Reason for training on shards that were captured without a certificate.",
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Nothing: no engine is launched for this backend."""

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Refuse: ``truetap extract`` starts its engine itself."""
        raise UsageError(
            f"the {NAME} backend launches no engine ({len(vars(args))} options were given)",
            remedy="capture with truetap extract, then truetap export-dataset",
        )

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> VerifiedTransfer:
        """Verify everything that can be before training; record it beside the checkpoints."""
        dataset = Path(data_path)
        shards = Path(args.truetap_shards) if args.truetap_shards else _shards_of(dataset)
        model = Path(args.verifier_name_or_path)
        if not model.is_dir():
            raise UsageError(
                f"{model} is no directory, so its weights cannot be compared with those that the "
                "shards are of",
                remedy="give --verifier-name-or-path the directory of the run's verifier",
            )
        store = Store(shards)
        wanted = (*_layers(args, model), verifier.describe(model).num_blocks)
        demanded = Path(args.truetap_policy) if args.truetap_policy else None
        made_from = provenance.examine(
            store,
            # The run's own profile was demanded when the dataset was exported.
            policy.demands_of(Gate(profile="shapes", policy=demanded)),
            boundaries=wanted,
            verifier=verifier.digests(model),
        )
        reason = uncertified.checked_reason(args.truetap_allow_uncertified)
        made_from.require_certified(unless=reason)
        audit_log.require_kept(store)
        entries = store.entries()
        transfer = VerifiedTransfer(shards, entries, _rows_of(dataset, store, entries))
        _record(made_from, reason, args)
        return transfer


def _shards_of(dataset: Path) -> Path:
    pointer = dataset / POINTER
    if not pointer.exists():
        raise UsageError(
            f"{dataset} does not say which shards its rows have their states in",
            remedy="make it with truetap export-dataset, or give --truetap-shards",
        )
    return dataset / str(run_folder.read_json(pointer)["shards"])


def _layers(args: argparse.Namespace, model: Path) -> Sequence[int]:
    """Return the boundaries that the trainer will take for the head's features."""
    if getattr(args, "from_pretrained", None):
        config = run_folder.read_json(Path(args.from_pretrained) / "config.json")
        if named := config.get("eagle_aux_hidden_state_layer_ids"):
            return tuple(named)
    if args.target_layer_ids:
        return tuple(args.target_layer_ids)
    return boundaries.eagle3(verifier.describe(model).num_blocks)[:-1]


def _rows_of(dataset: Path, store: Store, entries: Mapping[str, Mapping[str, Any]]) -> list[Place]:
    """Return where the states of every row are; ``IntegrityError`` if one has none.

    Rows are found by their tokens, in whatever order they are: states belong to tokens.
    """
    from datasets import load_from_disk

    places: dict[bytes, Place] = {}
    for name, entry in entries.items():
        for index, tokens in enumerate(store.tokens(entry)):
            places[_digest(tokens)] = (name, index)
    rows = load_from_disk(str(dataset)).with_format(None)["input_ids"]
    found = [places.get(_digest(tokens)) for tokens in rows]
    missing = [row for row, place in enumerate(found) if place is None]
    if missing:
        raise IntegrityError(
            f"{len(missing)} of {len(found)} rows of {dataset} have no states in {store.folder}, "
            f"the first is row {missing[0]}",
            remedy="run truetap export-dataset again",
        )
    return [place for place in found if place is not None]


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(
        b"".join(int(t).to_bytes(8, "little", signed=True) for t in tokens)
    ).digest()


def _record(made_from: Provenance, reason: str | None, args: argparse.Namespace) -> None:
    """Write what the heads in this folder are made from; say loudly if that is uncertified."""
    card, path = made_from.as_dict(), Path(args.save_path) / "truetap.json"
    known = run_folder.read_json(path) if path.exists() else {}
    given = known.get("uncertified", {}).pop("trained_because", [])
    if known and known != card:
        # The trainer goes on from the checkpoints there, whatever they were trained on.
        raise UsageError(
            f"{args.save_path} holds heads made from other shards",
            remedy="choose another --save-path",
        )
    if "uncertified" in card:
        card["uncertified"]["trained_because"] = list(dict.fromkeys([*given, reason]))
        logging.getLogger("speculators").critical(
            "UNCERTIFIED: the head will be %s", uncertified.told(card)
        )
    if os.environ.get("RANK", "0") == "0":
        run_folder.write_json(path, card)
