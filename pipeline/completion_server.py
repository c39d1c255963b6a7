"""Answers from an OpenAI-compatible server, in place of an engine of our own.

Prompts are sent as token ids and answers taken as token ids (``return_token_ids``), so nothing is
ever tokenised again: a text has more than one way to be tokens, and only one of them is what the
verifier saw and said. Every reply is compared with what was sent.

What passes by itself (a busy server, a restart, a lost connection) is asked again, with pauses that
grow, until a request's deadline. Requests run on an event loop in a thread of its own: a task can
be cancelled, a blocked thread could not.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from truetap.harness.engine import Finished, Prompt
from truetap.harness.errors import CheckFailed, CouldNotRun, TruetapError, UsageError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_PASSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses that another attempt may not meet."""

_CUT_OFF = frozenset({"abort", "error"})
"""What vLLM and SGLang say of a request that the server itself ended."""

_LONGEST_PAUSE_S = 30.0

_NO_SECRET = 3
"""Keys up to this length hide nothing, and taking them out would make any text unreadable."""

PLAIN_SAMPLING: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said each time: a server takes what is not said from the model's ``generation_config.json``, an
engine of our own does not, and the two would answer differently."""

TELLS_IDS = (
    "use a server that tells token ids: vLLM 0.10.2 or later, SGLang since July 2026, or leave "
    "data.server out, so that truetap starts an engine itself"
)

_REMEDIES = {
    401: "name the environment variable with the server's key in data.server_key",
    403: "name the environment variable with the server's key in data.server_key",
    404: 'data.server is the address that ends in "/v1"; data.server_model one of its models',
    400: TELLS_IDS,
    422: TELLS_IDS,
}


class CompletionServer:
    """A server at ``url`` that continues token ids.

    ``key`` goes into no message and no file. ``in_flight`` bounds the requests at a time,
    ``deadline_s`` the seconds for one of them, all its attempts and pauses included. ``say`` is
    told once of each cause for which something had to be asked again.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        in_flight: int = 64,
        deadline_s: float = 600.0,
        first_pause_s: float = 0.5,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise CouldNotRun(
                f"a server cannot be asked: {error}", remedy="pip install 'truetap[server]'"
            ) from error
        self.url = url.rstrip("/")
        try:
            httpx.URL(self.url).host  # noqa: B018  (it is decoded here, which may fail)
        except (httpx.InvalidURL, UnicodeError):
            raise self._unaskable() from None
        self._key = key or ""
        self.again = 0
        self._in_flight, self._deadline_s = in_flight, deadline_s
        self._first_pause_s, self._say = first_pause_s, say
        self._told: set[str] = set()
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=10.0),  # the deadline is ours, for all attempts
            limits=httpx.Limits(max_connections=in_flight + 2),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> CompletionServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is under way; the server sees its clients go and stops working for them."""
        if self._loop.is_closed():
            return
        with suppress(Exception):
            self._begin(self._ended()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()

    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        model: str,
        vocab_size: int,
        aliases: Collection[str] = (),
    ) -> Iterator[Finished]:
        """Have prompts continued; yield each as it finishes.

        As ``VllmEngine.generate``: a prompt is taken from ``prompts`` only when there is room for
        it. ``aliases`` are further names that the server may give ``model`` in its answers. Raises
        ``UsageError`` for a server that does not tell ids, ``CheckFailed`` for one that tells
        others than were sent, or none that the verifier has, or answers as another model.
        """
        names = frozenset((model, *aliases))
        waiting, exhausted = iter(prompts), False
        running: set[Future[Finished]] = set()
        try:
            while True:
                while not exhausted and len(running) < self._in_flight:
                    if (prompt := next(waiting, None)) is None:
                        exhausted = True
                        break
                    running.add(self._begin(self._continued(prompt, model, names, vocab_size)))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                # What is good comes first: it is kept before a failure ends the others.
                for future in sorted(done, key=lambda f: f.exception() is not None):
                    yield future.result()
        finally:
            for future in running:
                future.cancel()

    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, *, patience_s: float | None = None
    ) -> tuple[int, Any]:
        """Return the status and the JSON (None if it is none) of one question.

        ``path`` begins with a slash and is below ``url``, or below its root if it begins with two.
        """
        return self._begin(self._asked(path, body, patience_s or self._deadline_s)).result()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ended(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    def hide(self, text: str) -> str:
        """Return a text without the key, which servers and proxies like to repeat."""
        if len(self._key) <= _NO_SECRET:
            return text
        for shown in (self._key, repr(self._key)[1:-1]):
            text = text.replace(shown, "[the key]")
        return text

    @contextmanager
    def without_key(self) -> Iterator[None]:
        """Take the key out of what an error tells."""
        try:
            yield
        except TruetapError as error:
            error.args = tuple(self.hide(str(part)) for part in error.args)
            error.remedy = self.hide(error.remedy)
            raise

    def refused(self, status: int, reply: Any) -> UsageError:
        """Return the error for a status that says no for good."""
        return UsageError(
            f"{self.url} refuses with status {status}: {_short(reply, self.hide)}",
            remedy=_REMEDIES.get(status, "see the server's log"),
        )

    def _unaskable(self) -> UsageError:
        # Without httpx's own words: they repeat the header, and with it the key.
        return UsageError(
            f"{self.url} cannot be asked: the address or the key is none that HTTP can carry",
            remedy='write data.server as "http://host:port/v1"; look at the key for line breaks',
        )

    async def _continued(
        self, prompt: Prompt, model: str, names: Collection[str], vocab_size: int
    ) -> Finished:
        body = {
            "model": model,
            "prompt": list(prompt.token_ids),
            "return_token_ids": True,
            **PLAIN_SAMPLING,
            **prompt.sampling,
        }
        status, reply = await self._asked("/completions", body, self._deadline_s)
        if status != 200:
            raise self.refused(status, reply)
        with self.without_key():
            _require_model(reply, model, names)
            return finished_of(prompt, reply, vocab_size, self.hide)

    async def _asked(
        self, path: str, body: Mapping[str, Any] | None, patience_s: float
    ) -> tuple[int, Any]:
        """Ask until there is an answer that another attempt would not change."""
        address = self._root + path[1:] if path.startswith("//") else self.url + path
        cause, attempt = "", 0
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    cause, pause_s, reply = await self._attempt(address, body)
                    if reply is not None:
                        return reply.status_code, _json(reply)
                    self.again += 1
                    self._tell_once(cause)
                    await asyncio.sleep(max(pause_s, self._pause_s(attempt)))
                    attempt += 1
        except TimeoutError:
            seen = f"; the last attempt: {cause}" if cause else ""
            raise CouldNotRun(
                f"{address} gave no answer within {patience_s:g} s{seen}",
                remedy="see the server's log; run again to continue, with a longer "
                "data.server_deadline_s or a smaller data.server_requests if it is only slow",
            ) from None

    async def _attempt(
        self, address: str, body: Mapping[str, Any] | None
    ) -> tuple[str, float, httpx.Response | None]:
        """Return a reply, or why there is none and how long the server wants to be left alone."""
        import httpx

        try:
            if body is None:
                reply = await self._client.get(address)
            else:
                reply = await self._client.post(address, json=body)
        except (
            httpx.LocalProtocolError,
            httpx.UnsupportedProtocol,
            httpx.InvalidURL,
            UnicodeError,
        ):
            raise self._unaskable() from None
        except (httpx.RequestError, ExceptionGroup) as error:
            return self.hide(_cause(error)), 0, None
        if reply.status_code in _PASSES:
            wanted = reply.headers.get("Retry-After", "")
            pause_s = min(float(wanted), _LONGEST_PAUSE_S) if wanted.isdecimal() else 0.0
            return f"status {reply.status_code}", pause_s, None
        if reply.status_code == 200 and _reason(_json(reply)) in _CUT_OFF:
            return "the server ended the request itself", 0, None
        return "", 0, reply

    def _pause_s(self, attempt: int) -> float:
        # Drawn at random, or all that were refused together would come back together.
        longest: float = min(self._first_pause_s * 2 ** min(attempt, 16), _LONGEST_PAUSE_S)
        return longest * random.uniform(0.5, 1.0)

    def _tell_once(self, cause: str) -> None:
        if cause not in self._told:
            self._told.add(cause)
            self._say(f"{self.url}: {cause}; asking again")

    @property
    def _root(self) -> str:
        return self.url.removesuffix("/v1")


def _cause(error: Exception) -> str:
    """Return what failed, on one line."""
    if isinstance(error, ExceptionGroup):  # of a task group below httpx: its own text says nothing
        return _cause(error.exceptions[0])
    told = " ".join(str(error).split())
    return f"{type(error).__name__} ({told})" if told else type(error).__name__


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return None


def _choice(reply: Any) -> Mapping[str, Any]:
    """Return the only choice of a completion; an empty one for anything else."""
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping):
        return choices[0]
    return {}


def _reason(reply: Any) -> str:
    return str(_choice(reply).get("finish_reason"))


def _require_model(reply: Any, model: str, names: Collection[str]) -> None:
    """Raise if an answer says that another model gave it; one that says nothing is taken."""
    told = reply.get("model") if isinstance(reply, Mapping) else None
    if told is not None and not (isinstance(told, str) and told in names):
        raise CheckFailed(
            f"the server was asked for {model!r} and answers as {told!r}",
            remedy="serve the verifier of this run, or name the model that is it in "
            "data.server_model",
        )


def finished_of(
    prompt: Prompt, reply: Any, vocab_size: int, hide: Callable[[str], str]
) -> Finished:
    """Return what a completion's JSON says, if it is an answer to ``prompt`` in token ids."""
    choice = _choice(reply)
    text, reason = choice.get("text"), _reason(reply)
    if not isinstance(text, str):
        raise CouldNotRun(
            f"the server's answer to {prompt.key!r} is no completion: {_short(reply, hide)}",
            remedy='data.server is the address that ends in "/v1"',
        )
    sent, said = choice.get("prompt_token_ids"), choice.get("token_ids")
    if not _ids(sent) or not _ids(said):
        raise UsageError("the server does not tell token ids with its answers", remedy=TELLS_IDS)
    _require_sent(prompt, sent)
    limit = prompt.sampling["max_tokens"]
    if strange := [token for token in said if not 0 <= token < vocab_size]:
        raise CheckFailed(
            f"the server answered {prompt.key!r} with token {strange[0]}; the verifier has "
            f"{vocab_size}",
            remedy="another model answers there: serve the verifier of this run",
        )
    if reason not in ("stop", "length") or len(said) > limit:
        raise CheckFailed(
            f"the server ended its answer to {prompt.key!r} after {len(said)} of {limit} tokens, "
            f"for the reason {reason!r}"
        )
    if reason == "length" and len(said) < limit:
        raise CheckFailed(
            f"the server cuts answers at {len(said)} tokens, data.max_answer_tokens is {limit}",
            remedy="raise the server's own limit (vLLM: --max-model-len, or max_new_tokens in "
            "--override-generation-config), or lower data.max_answer_tokens",
        )
    return Finished(prompt.key, list(said), text, reason, None, None, None)


def _ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _require_sent(prompt: Prompt, seen: list[int]) -> None:
    sent = list(prompt.token_ids)
    if seen == sent:
        return
    at = next((n for n, (a, b) in enumerate(zip(sent, seen, strict=False)) if a != b), None)
    where = (
        f"{len(seen)} tokens in place of {len(sent)}" if at is None else f"token {at} is another"
    )
    raise CheckFailed(
        f"the server continued another prompt than {prompt.key!r}, which it was sent: {where}",
        remedy="something between truetap and the engine changes prompts: it must pass token ids "
        "on untouched",
    )


def _short(reply: Any, hide: Callable[[str], str]) -> str:
    """Return what a server says of an error, on one line."""
    said = reply
    for key in ("error", "message"):
        if isinstance(said, Mapping) and key in said:
            said = said[key]
    # The key first: cut in the middle, half of it would stay.
    text = hide(" ".join(str(said).split())) if said is not None else "no JSON"
    return text if len(text) <= 300 else text[:300] + " ..."
