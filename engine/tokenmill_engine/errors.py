"""What the engine can refuse, and why.

EngineError
├── ConfigError            an engine option is wrong, or options do not fit together
├── ModelLoadError         the model folder is missing, unreadable or unsafe
│   └── UnsupportedModel   the architecture cannot be served exactly; the text says why
├── InvalidRequest         one request is wrong; it names the field and the limit, never the value
│   ├── UnsupportedParameter
│   ├── PromptTooLong      the prompt leaves no room for a token within max_model_len
│   └── RequestTooLarge    prompt + max_tokens can never fit into the KV cache
├── DuplicateRequest       the id is already running
├── ResumeMismatch         published tokens cannot belong to this request
├── SamplingFailed         the logits of one request leave no token to choose
└── StepFailed             the model cannot compute one request, not even alone
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """An engine option is wrong; `field` is the option's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelLoadError(EngineError):
    """The model could not be loaded."""


class UnsupportedModel(ModelLoadError):
    """The model cannot be served exactly; the text is meant for the user."""


class InvalidRequest(EngineError):
    """One request is wrong; neighbours are not affected. `field` is the parameter's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnsupportedParameter(InvalidRequest):
    """The parameter is known to the field, but this engine does not offer it."""


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a single token within max_model_len."""


class RequestTooLarge(InvalidRequest):
    """Prompt and max_tokens together can never fit into the KV cache."""


class DuplicateRequest(EngineError):
    """A request with this id is already waiting or running."""


class ResumeMismatch(EngineError):
    """The tokens said to be published already cannot belong to this request."""


class SamplingFailed(EngineError):
    """The logits of one request are not finite or all masked; no neighbour is affected."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id}: no token can be sampled; its logits are not finite, or "
            "allowed_token_ids, bad_words and min_tokens leave none"
        )
        self.request_id = request_id


class StepFailed(EngineError):
    """The model failed on one request, also on that one alone; no neighbour is affected.

    `reason` is the type of what was raised: its text might quote a prompt.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(
            f"request {request_id}: the model cannot compute it ({reason}), not even alone"
        )
        self.request_id = request_id
        self.reason = reason
