"""The text that a chat template puts around what the policy writes, as token ids.

The ids of an episode grow at their end only: prompt, what the policy wrote (the engine's ids as they are), then the
template's own text from there through the observation to the next generation prompt, tokenised once. Nothing is ever
rendered or tokenised again, so a template that would rewrite history (drop earlier reasoning) has no say in it.

That text is found by rendering a short conversation with a call and the observation, and taking what follows the call's
end-of-turn token. A *boundary* (the end of prompt or observation) lies before the generation prompt; what makes the
prefix answer-ready from there is the *opener*: generation prompt, reasoning closed, ``<answer>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_fast.errors import ConfigError, RolloutError
from trace_fast.formats.answers import SeamSplitter, answer_ids, auto_opener, encode
from trace_fast.formats.template import ChatTemplate, Message
from trace_fast.trainer.harness.call_formats import CallFormat, detect_call_format
from trace_fast.trainer.search.tools import SEARCH, tool_schemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTIONS = (
    "Answer the question with the help of the browser tools. Think first, then make exactly one tool call, and read "
    "its result before the next. When you know the answer, write it alone inside <answer> and </answer>."
)
_WRITTEN_TOOLS = (
    "\n\nTools:\n{tools}\n\nTo call a tool, end your message with\n"
    '<tool_call>\n{{"name": <tool name>, "arguments": <object>}}\n</tool_call>'
)
_MARK = "sentinel7hotel"


@dataclass(frozen=True, slots=True)
class Piece:
    """Ids that the environment adds. ``boundary`` of them come before the generation prompt."""

    ids: np.ndarray
    boundary: int


class ChatFrame:
    """One tokenizer's template, ready for episodes.

    Args:
        opener: what follows the generation prompt in a scored state; ``auto`` as in ``read_rollouts``.
        instructions: the system message. call_format: how calls are written; found out from the template by default.

    Raises:
        RolloutError: kind ``template``: there is no template, or it refuses these conversations.
        ConfigError: the template's parts cannot be told apart, or its calls are in a format not known here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        opener: str = "auto",
        instructions: str = INSTRUCTIONS,
        call_format: CallFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self.call_format: CallFormat = detect_call_format(self._template) if call_format is None else call_format
        self._tools: list[dict[str, Any]] | None = tool_schemas()
        if "tools" in self._template.drops:
            listed = "\n".join(json.dumps(tool["function"]) for tool in self._tools)
            instructions += _WRITTEN_TOOLS.format(tools=listed)
            self._tools = None
        self._instructions = instructions
        self._splitter = SeamSplitter(tokenizer)
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.end_text = self._find_end()
        self.stop_ids: tuple[int, ...] = (added[self.end_text],)
        prompt, closed = self._generation_prompts()
        self._generation_prompt = prompt
        self.thinking_open = prompt.rfind("<think>") > prompt.rfind("</think>")
        self.opener_text = closed + self._template.closing(closed) + (
            auto_opener(tokenizer) if opener == "auto" else opener
        )
        self.opener_ids = self._splitter.opener(self.opener_text)
        self._call_mark = self._marked_call()
        self.after_call("x", SEARCH)  # a template that refuses tool results says so now, not in an episode

    def messages(self, question: str) -> list[Message]:
        """The messages that an episode begins with."""
        return [{"role": "system", "content": self._instructions}, {"role": "user", "content": question}]

    # --- ids ----------------------------------------------------------------------------------------------------

    def prompt(self, question: str) -> Piece:
        """The ids that an episode begins with."""
        return self._piece(self._rendered(self.messages(question), prompt=True))

    def after_call(self, observation: str, tool: str) -> Piece:
        """The ids between the end-of-turn token of a call and the policy's next token."""
        safe = self.neutral(observation)
        result: Message = {"role": "tool", "content": safe, "tool_call_id": "call00007", "name": tool}
        text = self._rendered([*self.messages("x"), self._call_mark, result], prompt=True)
        mark = text.find(_MARK)
        end = text.find(self.end_text, mark)
        assert 0 <= mark < end, (mark, end)
        return self._piece(text[end + len(self.end_text) :])

    def answers(self, golds: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Ids of every gold answer as they follow the opener.

        Raises:
            RolloutError: kind ``seam``: one token spans opener and answer.
        """
        return answer_ids(self._splitter, [self.opener_text], golds)

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has by itself."""
        return len(encode(self.tokenizer, self.neutral(text)))

    def written(self, ids: np.ndarray) -> str:
        """The text of ids that the policy wrote, without its end-of-turn token; to be read, never to be encoded."""
        kept = ids[:-1] if len(ids) and int(ids[-1]) in self.stop_ids else ids
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def neutral(self, text: str) -> str:
        """The text with a space inside everything that would become a control token: a document cannot end a turn."""
        if self._control is None:
            return text
        return self._control.sub(lambda match: match.group()[:1] + " " + match.group()[1:], text)

    # --- the template -------------------------------------------------------------------------------------------

    def _rendered(self, messages: list[Message], *, prompt: bool, thinking: bool | None = None) -> str:
        adapted, _ = self._template.adapt(messages, self._tools)
        return self._template.render(adapted, self._tools, prompt=prompt, thinking=thinking)

    def _piece(self, text: str) -> Piece:
        if not text.endswith(self._generation_prompt):
            raise ConfigError(f"chat template: expected {self._generation_prompt!r} at the end, got {text[-60:]!r}")
        before = encode(self.tokenizer, text[: len(text) - len(self._generation_prompt)])
        return Piece(np.concatenate([before, encode(self.tokenizer, self._generation_prompt)]), len(before))

    def _generation_prompts(self) -> tuple[str, str]:
        """The generation prompt, and the one that asks for no reasoning where the template has such a switch."""
        messages = self.messages("x")
        plain = self._rendered(messages, prompt=False)
        prompted = self._rendered(messages, prompt=True)
        thinking = False if self._template.closes_thinking else None
        closed = self._rendered(messages, prompt=True, thinking=thinking)
        if not prompted.startswith(plain) or not closed.startswith(plain):
            raise ConfigError("chat template: its generation prompt changes the text before it, so no prefix can grow")
        prompt = prompted[len(plain) :]
        if prompt and (self._control is None or self._control.match(prompt) is None):
            raise ConfigError(
                f"chat template: expected a generation prompt that begins with a token of its own, got {prompt!r}; "
                "tokens would span the boundary before it"
            )
        return prompt, closed[len(plain) :]

    def _find_end(self) -> str:
        """The token that ends an assistant message: the first one of the tokenizer's added ones behind its text."""
        messages: list[Message] = [
            *self.messages("x"),
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": "y"},
        ]
        text = self._rendered(messages, prompt=False)
        match = None if self._control is None else self._control.search(text, text.find(_MARK) + len(_MARK))
        if _MARK not in text or match is None:
            raise ConfigError("chat template: no token ends an assistant message, so a turn would never stop")
        return match.group()

    def _marked_call(self) -> Message:
        function = {"name": SEARCH, "arguments": {"query": _MARK}}
        call = {"id": "call00007", "type": "function", "function": function}
        marked: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self._rendered([*self.messages("x"), marked], prompt=False)
        except RolloutError as error:
            raise ConfigError(f"chat template: it refuses a tool call: {error.reason}") from None
        if self.end_text not in text[text.find(_MARK) :] or _MARK not in text:
            raise ConfigError(f"chat template: expected {self.end_text!r} after a tool call, got {text[-60:]!r}")
        return marked
