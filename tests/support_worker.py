"""A worker's surroundings for tests: an engine without torch, deliveries, and worker processes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokenmill.replies import Lease
from tokenmill_engine.errors import InvalidRequest, PromptTooLong, ResumeMismatch
from tokenmill_engine.outputs import EngineStats, RequestOutput, TokenLogprobs, WaitingRequest
from tokenmill_engine.request import FinishReason
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_worker.delivery import Delivery

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 4096


def text_of(token_ids: Sequence[int]) -> str:
    """One letter per token, some of them outside ASCII."""
    return "".join("abcdefghijklmnopqrstuvwxyzäöü€"[i % 30] for i in token_ids)


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """A function of everything before: one wrong or missing token changes all that follow."""
    state = f"{seed}:{','.join(map(str, token_ids))}".encode()
    return int.from_bytes(hashlib.blake2b(state, digest_size=4).digest()) % VOCAB_SIZE


def expected_tokens(prompt_token_ids: Sequence[int], seed: int, count: int) -> list[int]:
    """The oracle: what any sequence of workers must publish for a request."""
    token_ids = list(prompt_token_ids)
    for _ in range(count):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt_token_ids) :]


class FakeTokenizer:
    """One token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def render_chat(
        self,
        messages: list[dict[str, object]],
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        if messages[-1]["role"] == "system":
            raise InvalidRequest("messages", "must end with a user's message")
        rendered = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(rendered + ("" if continue_final_message else "<assistant>"))


@dataclass(frozen=True)
class FakeDefaults:
    """A generation config that sets one thing."""

    sampling: Mapping[str, object] = field(default_factory=lambda: {"top_k": 7})

    def apply(self, explicit: Mapping[str, object]) -> SamplingParams:
        return SamplingParams(**{**self.sampling, **explicit})  # type: ignore[arg-type]


@dataclass
class _Sequence:
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    emitted_chars: int
    num_given: int


class FakeEngine:
    """Deterministic, without torch; text lags one character behind the tokens, as it may.

    A prompt that begins with one of these words misbehaves: `refuse` is not accepted, `explode`
    fails the step of its first token, `hang` never ends it; `wedge` hangs at its sixth, unless
    another engine has begun it.

    Requests start in the order of their arrival, when there are blocks for all they will need; who
    finds none lets nobody pass.
    """

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        max_num_seqs: int = 128,
        num_blocks: int = 100_000,
        block_size: int = 16,
    ) -> None:
        self.tokenizer = FakeTokenizer()
        self.defaults = FakeDefaults()
        self.max_model_len = MAX_MODEL_LEN
        self.model_name = "fake"
        self.released = threading.Event()  # ends a step that hangs
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._sequences: dict[str, _Sequence] = {}
        self._running: set[str] = set()
        self.alone: list[str] = []  # those that were to be prefilled alone
        self._stats = EngineStats(
            num_blocks=num_blocks, num_free_blocks=num_blocks, block_size=block_size
        )

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._sequences)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        emitted_chars: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        alone: bool = False,
    ) -> None:
        if alone:
            self.alone.append(request_id)
        if bytes(t for t in prompt_token_ids if t < 256).startswith(b"refuse"):
            raise InvalidRequest("prompt", "this engine refuses it")
        if any(token_id >= VOCAB_SIZE for token_id in prompt_token_ids):
            raise InvalidRequest("prompt_token_ids", f"must be below {VOCAB_SIZE}")
        if len(prompt_token_ids) >= MAX_MODEL_LEN:
            raise PromptTooLong("prompt", f"must be shorter than {MAX_MODEL_LEN} tokens")
        if (emitted_chars or 0) > len(output_token_ids):
            raise ResumeMismatch("more text than tokens")
        self._sequences[request_id] = _Sequence(
            list(prompt_token_ids),
            list(output_token_ids),
            params,
            emitted_chars or 0,
            num_given=len(output_token_ids),
        )

    def abort_request(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)
        self._running.discard(request_id)

    def step(self) -> list[RequestOutput]:
        time.sleep(self._step_s)
        self._admit()
        running = [
            (name, self._sequences[name]) for name in self._sequences if name in self._running
        ]
        outputs = [self._advance(request_id, sequence) for request_id, sequence in running]
        generated = sum(len(output.new_token_ids) for output in outputs)
        self._stats = replace(
            self._stats,
            num_batched_tokens=generated,
            steps_total=self._stats.steps_total + 1,
            generation_tokens_total=self._stats.generation_tokens_total + generated,
        )
        return outputs

    def stats(self) -> EngineStats:
        waiting = [name for name in self._sequences if name not in self._running]
        return replace(
            self._stats,
            num_running=len(self._running),
            num_waiting=len(waiting),
            num_free_blocks=self._num_free_blocks(),
            waiting=tuple(
                WaitingRequest(name, len(self._sequences[name].prompt), name == waiting[0], 0)
                for name in waiting
            ),
        )

    def _admit(self) -> None:
        for name, sequence in self._sequences.items():
            if name in self._running:
                continue
            if len(self._running) == self._max_num_seqs:
                return
            if self._blocks(sequence) > self._num_free_blocks():
                return
            self._running.add(name)

    def _blocks(self, sequence: _Sequence) -> int:
        return -(-(len(sequence.prompt) + sequence.params.max_tokens) // self._stats.block_size)

    def _num_free_blocks(self) -> int:
        taken = sum(self._blocks(self._sequences[name]) for name in self._running)
        return self._stats.num_blocks - taken

    def _advance(self, request_id: str, sequence: _Sequence) -> RequestOutput:
        prompt = bytes(t for t in sequence.prompt if t < 256)
        if prompt.startswith(b"explode"):
            raise RuntimeError("secret prompt text")
        is_wedged = prompt.startswith(b"wedge") and len(sequence.output) == 5
        if prompt.startswith(b"hang") or (is_wedged and not sequence.num_given):
            self.released.wait(60)
        new: tuple[int, ...] = ()
        if _finish(sequence) is None:
            new = (next_token(sequence.prompt + sequence.output, sequence.params.seed or 0),)
            sequence.output += new
        finish = _finish(sequence)
        text = text_of(sequence.output)
        shown = text if finish else text[:-1]
        delta, sequence.emitted_chars = shown[sequence.emitted_chars :], len(shown)
        if finish:
            self.abort_request(request_id)
        return RequestOutput(
            request_id=request_id,
            new_token_ids=new,
            text=delta,
            logprobs=_logprobs(new) if sequence.params.logprobs is not None else (),
            num_prompt_tokens=len(sequence.prompt),
            num_output_tokens=len(sequence.output),
            finish_reason=finish,
        )


def _finish(sequence: _Sequence) -> FinishReason | None:
    if sequence.output and sequence.output[-1] in sequence.params.stop_token_ids:
        return FinishReason.STOP
    if len(sequence.output) >= sequence.params.max_tokens:
        return FinishReason.LENGTH
    return None


def _logprobs(new: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs((token, 0), (-0.5, float("-inf")), (1, 2)) for token in new)


def make_lease(**changes: object) -> Lease:
    lease = Lease(
        request_id="request-1",
        ready_class="1",
        entry_id="1-0",
        attempt=1,
        fence="1.1000",
        num_events=0,
        remaining_ms=60_000,
        waited_ms=5,
        strikes=0,
        tenant="default",
        fingerprint="",
        body='{"prompt":"hello","max_tokens":4}',
    )
    return replace(lease, **changes)  # type: ignore[arg-type]


def make_delivery(**changes: object) -> Delivery:
    return Delivery(make_lease(**changes))


def make_output(
    *token_ids: int, request_id: str = "request-1/1.1000", **changes: object
) -> RequestOutput:
    output = RequestOutput(request_id=request_id, new_token_ids=token_ids, text=text_of(token_ids))
    return replace(output, **changes)  # type: ignore[arg-type]


def fake_engine_factory(**options: float) -> Callable[[Callable[[str], None]], FakeEngine]:
    def build(on_phase: Callable[[str], None]) -> FakeEngine:
        on_phase("pretending")
        return FakeEngine(**options)  # type: ignore[arg-type]

    return build
