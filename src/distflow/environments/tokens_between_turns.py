"""The tokens between two turns, which the chat template writes after a reply: found by rendering
the template with a stand-in for the reply. Drawn tokens are never decoded and re-encoded."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from distflow.data.chat_template import Chat as Rows
from distflow.data.chat_template import ChatTemplate, render_all, template_of
from distflow.data.control_words import control_words, described, find_control_word
from distflow.data.images import ImageEncoder, encoder_of
from distflow.data.messages import RowError
from distflow.errors import UserError

Message = Mapping[str, Any]
_ASKED: Message = {"role": "user", "content": "stand-in question"}
_MORE: Message = {"role": "user", "content": "another stand-in question"}
_STAND_IN = "stand-in reply"
_THINKING = "stand-in thinking"


class TemplateError(UserError):
    """The chat template cannot be used for several turns, or not with these messages."""


class TurnTokens:
    """Encodes the input of a chat with a tokenizer and its template. stop_ids: tokens that end a
    reply. kwargs: further arguments of the template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        kwargs: Mapping[str, object],
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._kwargs = kwargs
        self._between: dict[str, tuple[tuple[int, ...], int]] = {}

    @property
    def vocabulary(self) -> int:
        """The number of its tokens."""
        return len(self._tokenizer)

    @property
    def image_mark(self) -> str:
        """The place of an image in a text. Raises TemplateError if the model reads text alone."""
        return self._images().mark

    def token_id(self, token: str) -> int:
        """Raises TemplateError for a text that is no token."""
        found = self._tokenizer.get_vocab().get(token)
        if found is None:
            raise TemplateError(f"the tokenizer has no token {token!r}")
        return int(found)

    def with_images(self, text: str, paths: Sequence[str]) -> tuple[int, ...]:
        """Plain text at the beginning, with the placeholders of its images."""
        return tuple(self._images().encode(text, paths))

    def _images(self) -> ImageEncoder:
        if (encoder := encoder_of(self._tokenizer)) is None:
            raise TemplateError(
                "the model reads text alone, and was shown an image: take one that reads images"
            )
        return encoder

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def written(self, token_ids: Sequence[int]) -> str:
        """The text of a reply with its special tokens, except the one that ended it."""
        kept = token_ids
        if token_ids and token_ids[-1] in self._stop_ids:
            kept = token_ids[:-1]
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))

    def tool_template(self, tools: Sequence[Message]) -> str:
        """The chat template's text for these tools. Raises TemplateError if it would omit them."""
        self._check_template()
        template = str(self._tokenizer.get_chat_template(None, list(tools)))
        if "tools" not in template:
            raise TemplateError(
                f"{template_of(self._tokenizer)} does not use tools: use a model whose template "
                "does"
            )

        return template

    def control_word(self, messages: Sequence[Message], is_drawn: Callable[[str], bool]) -> str:
        """Why these messages would be templated twice; empty if they would not. is_drawn: whether
        the policy has written that word itself, which may then come back in any message."""
        words = None
        if self._tokenizer.chat_template:
            words = control_words(self._tokenizer)

        if words is None:
            return ""

        for message in messages:
            word = ""
            if message.get("role") != "assistant":
                word = find_control_word(message.get("content"), words)

            if word and not is_drawn(word):
                return (
                    f"a message of the {message.get('role')} "
                    f"{described(word, template_of(self._tokenizer))}"
                )

        return ""

    def of_text(self, text: str, *, begins: bool) -> tuple[int, ...]:
        """Plain text; at the beginning with the tokenizer's own special tokens, later without the
        space that some tokenizers put in front of a text."""
        if begins:
            return self._ids(text, special=True)

        for before in ("\n", "x"):
            start = self._ids(before)
            whole = self._ids(before + text)
            if whole[: len(start)] == start:
                return whole[len(start) :]

        return self._ids(text)

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> tuple[int, ...]:
        """The tokens of the first prompt. Raises TemplateError."""
        return self._ids(self._render(messages, tools))

    def between(
        self, messages: Sequence[Message], last_drawn: int, tools: Sequence[Message] = ()
    ) -> tuple[int, ...]:
        """The tokens from the end of a reply to the prompt of the next: the end of the turn unless
        it was drawn, the new messages, the generation prompt. Raises TemplateError."""
        key = json.dumps([messages, tools], default=str)
        if key not in self._between:
            stand_in = _STAND_IN
            while stand_in in key:
                stand_in += " again"
            self._between[key] = self._rendered_between(messages, tools, stand_in)

        ids, num_closing = self._between[key]
        if last_drawn not in self._stop_ids:
            return ids
        return ids[num_closing or ids[:1] == (last_drawn,) :]

    def _rendered_between(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        stand_in: str,
    ) -> tuple[tuple[int, ...], int]:
        """The ids after a reply, and how many of them belong to the end of its turn, up to its
        first stop token."""
        begun = [_ASKED, {"role": "assistant", "content": stand_in}]
        ids = self._after_reply(self._render([*begun, *messages], tools), stand_in)

        closed = self._after_reply(self._render(begun, tools, prompts=False), stand_in)
        for number, (token, same) in enumerate(zip(ids, closed, strict=False), 1):
            if token != same:
                break
            if token in self._stop_ids:
                return ids, number

        return ids, 0

    def _after_reply(self, text: str, stand_in: str) -> tuple[int, ...]:
        before, found, after = text.partition(stand_in)
        if not found or stand_in in after:
            raise TemplateError(
                f"{template_of(self._tokenizer)} does not write each reply exactly once and "
                "unchanged, so the tokens after a reply cannot be determined: use another "
                "template, or data.prompt_format=text"
            )

        start = self._ids(before + found)
        whole = self._ids(text)
        if whole[: len(start)] != start:
            raise TemplateError(
                f"{template_of(self._tokenizer)} continues after a reply with {after[:20]!r}, "
                "which the tokenizer joins with the reply, so its tokens depend on the sampled "
                "text: use a template that ends a turn with a special token, or "
                "data.prompt_format=text"
            )

        return whole[len(start) :]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompts: bool = True
    ) -> str:
        self._check_template()
        try:
            rows = Rows(
                [dict(message) for message in messages],
                [dict(tool) for tool in tools],
                self._kwargs,
            )
            return ChatTemplate(self._tokenizer).render(rows, prompts=prompts)
        except (jinja2.TemplateError, RowError, TypeError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"{template_of(self._tokenizer)} refuses messages of {roles}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _check_template(self) -> None:
        if not getattr(self._tokenizer, "chat_template", None):
            raise TemplateError(
                "messages need a chat template, and the tokenizer has none: pass text, or set "
                "actor_rollout_ref.model.tokenizer_path to an instruction-tuned model"
            )

    def _ids(self, text: str, special: bool = False) -> tuple[int, ...]:
        # which take as long as the ids
        without = {"return_attention_mask": False, "return_token_type_ids": False}
        return tuple(
            self._tokenizer(text, add_special_tokens=special, verbose=False, **without)["input_ids"]
        )

    def describe(self) -> list[str]:
        """What the template does between turns, in sentences; it runs as in `render_all`. Raises
        UserError if it cannot be used."""

        def said_or_error(_: None) -> Any:
            try:
                return self._describe()
            except TemplateError as error:
                return {"error": str(error)}

        (said,) = render_all([None], said_or_error, self._tokenizer)
        if not isinstance(said, list):
            raise TemplateError(said if isinstance(said, str) else said["error"])
        return said

    def _describe(self) -> list[str]:
        ids, num_closing = self._rendered_between([_MORE], (), _STAND_IN)
        said = ["each turn follows the tokens of the one before"]
        if num_closing:
            closing = self._tokenizer.decode(ids[:num_closing])
            said.append(f"a reply that was cut off is closed with {closing!r}")
        else:
            said.append("no end token is known to end a reply, so all of its text is added")

        for reply in (_STAND_IN, f"<think>\n{_THINKING}\n</think>\n\n{_STAND_IN}"):
            begun = self._render([_ASKED]) + reply
            turns = [_ASKED, {"role": "assistant", "content": reply}, _MORE]
            if not self._render(turns).startswith(begun):
                said.append("it would write earlier turns anew; an episode keeps what was sampled")
                break

        return said
