"""Chats to token ids through the model's own chat template.

Templates run in the sandbox of transformers, and control tokens that stand in a message's text are
encoded as plain text, so that a user cannot end a turn and begin another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .errors import InvalidRequest, UnsupportedParameter
from .input_checks import check_text

#: The names of messages take part in control tokens and are not sanitized by transformers.
ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
#: What a template may end with: it is a program, given data that its author did not foresee.
_TEMPLATE_FAILURES = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


class ChatTemplate:
    """Renders chats for one tokenizer. Not safe to call from several threads at once."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self._hf: Any = hf  # transformers gives its methods no usable types

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, object],
    ) -> list[int]:
        """Raises InvalidRequest or UnsupportedParameter, never with a part of a message in it."""
        chat = [_checked(index, message) for index, message in enumerate(messages)]
        if not chat:
            raise InvalidRequest("messages", "must hold at least one message")
        if continue_final_message and chat[-1]["role"] != "assistant":
            raise InvalidRequest(
                "continue_final_message", "needs a last message of the role assistant"
            )
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            raise InvalidRequest("chat_template_kwargs", f"must not set {', '.join(reserved)}")
        template = self._template()
        try:
            token_ids: list[int] = self._hf.apply_chat_template(
                chat,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
                **template_kwargs,
            )
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest("messages", _explain(error, template)) from None
        return token_ids

    def _template(self) -> str:
        try:
            template: str = self._hf.get_chat_template()
        except ValueError:
            raise InvalidRequest(
                "messages", "the model has no chat template; send `prompt` instead"
            ) from None
        return template


def _explain(error: Exception, template: str) -> str:
    """The template author's own words where they are no more than that, else the kind of error."""
    text = str(error)
    if isinstance(error, TemplateError) and text and text in template:
        return f"the model's chat template refused the conversation: {text}"
    return f"the model's chat template failed on the conversation ({type(error).__name__})"


def _checked(index: int, message: Mapping[str, object]) -> dict[str, str]:
    """The message with its content as one text."""
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, "must be an object with role and content")
    if unknown := message.keys() - _MESSAGE_FIELDS:
        raise UnsupportedParameter(
            field, f"has {len(unknown)} fields other than {', '.join(sorted(_MESSAGE_FIELDS))}"
        )
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    checked = {"role": str(role), "content": _content(f"{field}.content", message.get("content"))}
    if (name := message.get("name")) is not None:
        checked["name"] = check_text(f"{field}.name", name)
    return checked


def _content(field: str, content: object) -> str:
    """Templates are written for texts and print a list as Python would: parts become one text."""
    if not isinstance(content, (list, tuple)):
        return check_text(field, content)
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise UnsupportedParameter(field, "only parts of the type text are supported")
        texts.append(check_text(field, part.get("text")))
    return "".join(texts)
