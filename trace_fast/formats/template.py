"""One tokenizer's chat template: what it can render, what it drops, and how its generation prompt ends.

Templates run in transformers' sandboxed jinja. What a template silently drops is found out once per tokenizer, by
rendering small conversations with sentinels in them, never per record; dropped text is written into the content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trace_fast.errors import RolloutError
from trace_fast.formats.messages import think_block, tool_call_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

NOTE_TOOL_CALLS = "chat template does not render tool_calls; written into the content"
NOTE_REASONING = "chat template does not render reasoning_content; written into the content"
NOTE_REASONING_LOST = "chat template drops reasoning_content; the rollout's tokens lack it"
NOTE_TOOL_ROLE = "chat template does not render the tool role; results written as <tool_response> of the user"
NOTE_SYSTEM = "chat template does not render the system role; written before the first user message"
NOTE_TOOLS = "chat template does not render the list of tools; the prompt lacks it"
NOTE_CONTENT = "chat template drops the text beside tool calls"

_HARMONY_PROMPT = "<|start|>assistant"
_HARMONY_FINAL = "<|channel|>final<|message|>"
_THINK, _END_THINK = "<think>", "</think>"
_CLOSE_THINK = "\n</think>\n\n"

_SYSTEM, _USER, _TEXT, _REASON, _CALL, _RESULT, _TOOL = (
    f"sentinel{word}7" for word in ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf")
)


def _call_message(content: str = "", reasoning: str | None = None) -> Message:
    call = {"id": "call00007", "type": "function", "function": {"name": "look", "arguments": {"q": _CALL}}}
    message: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as JSON text, for templates that put them into the text as they are."""
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "looks things up",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}},
        },
    }
]


@dataclass(slots=True)
class ChatTemplate:
    """Renders messages with the tokenizer's own template, and adapts what it would drop.

    Raises:
        RolloutError: kind ``template``, on construction when the tokenizer has none.
    """

    tokenizer: PreTrainedTokenizerBase
    parts: bool = field(init=False, default=False)
    text_arguments: bool = field(init=False, default=False)
    drops: frozenset[str] = field(init=False, default=frozenset())
    closes_thinking: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise RolloutError(
                "template",
                "the tokenizer has no chat template, so messages cannot be turned into its tokens; use a tokenizer "
                "with one, or give the rollout as text segments (segments form) or token ids (tokens form)",
            )
        self._probe()

    # --- rendering ----------------------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool, thinking: bool | None = None
    ) -> str:
        """The text of messages; ``prompt`` adds the generation prompt, ``thinking=False`` asks it to close thinking.

        Raises:
            RolloutError: kind ``template`` with the template's own message.
        """
        conversation = [self._with_parts(message) for message in messages] if self.parts else list(messages)
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tools=tools, add_generation_prompt=prompt, tokenize=False, **options
            )
        except Exception as error:  # a template is a program of its own: whatever it raises, it refuses this record
            raise RolloutError(
                "template", f"the chat template refuses these messages: {type(error).__name__}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    @staticmethod
    def closing(prompt: str) -> str:
        """What makes a generation prompt answer-ready: the end of thinking where the prompt leaves it open."""
        if prompt.rfind(_THINK) > prompt.rfind(_END_THINK):
            return _CLOSE_THINK
        return _HARMONY_FINAL if prompt.endswith(_HARMONY_PROMPT) else ""

    def adapt(self, messages: Sequence[Message], tools: list[Any] | None) -> tuple[list[Message], tuple[str, ...]]:
        """Messages (as many as before) with what the template drops written into the text, and notes about it."""
        adapted: list[Message] = []
        notes: dict[str, None] = {}
        pending = ""
        for original in messages:
            message = dict(original)
            role = message["role"]
            if role == "assistant":
                reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
                if calls and "tool_calls" in self.drops:
                    del message["tool_calls"]
                    written = [message["content"], *map(tool_call_text, calls)]
                    message["content"] = "\n".join(part for part in written if part)
                    notes[NOTE_TOOL_CALLS] = None
                elif calls:
                    if message["content"] and "content" in self.drops:
                        notes[NOTE_CONTENT] = None
                    if self.text_arguments:
                        message["tool_calls"] = [_with_text_arguments(call) for call in calls]
                if reasoning and "any reasoning" in self.drops:
                    notes[NOTE_REASONING_LOST] = None
                elif reasoning and "reasoning" in self.drops:
                    del message["reasoning_content"]
                    message["content"] = think_block(reasoning) + message["content"]
                    notes[NOTE_REASONING] = None
            elif role == "tool" and "tool" in self.drops:
                message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
                notes[NOTE_TOOL_ROLE] = None
            elif role == "system" and "system" in self.drops and message["content"]:
                pending += message["content"] + "\n\n"
                notes[NOTE_SYSTEM] = None
            elif role == "user" and pending:
                message["content"] = pending + message["content"]
                pending = ""
            adapted.append(message)
        if tools and "tools" in self.drops:
            notes[NOTE_TOOLS] = None
        return adapted, tuple(notes)

    @staticmethod
    def _with_parts(message: Message) -> Message:
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    # --- probing ------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        ask: Message = {"role": "user", "content": _USER}
        shown = self._try([ask])
        if shown is not None and _USER not in shown:
            self.parts = True
            shown = self._try([ask])
        if shown is None or _USER not in shown:
            self.parts = False  # it refuses even this, or shows nothing: every record will say so
            return
        drops: set[str] = set()
        result: Message = {"role": "tool", "content": _RESULT, "tool_call_id": "call00007", "name": "look"}
        if self._loses(_SYSTEM, [{"role": "system", "content": _SYSTEM}, ask]):
            drops.add("system")
        if self._try([ask, _call_message(), result]) is None:
            spelled = {**_call_message(), "tool_calls": [_with_text_arguments(_call_message()["tool_calls"][0])]}
            self.text_arguments = self._try([ask, spelled, result]) is not None
        bare, beside = [ask, self._call()], [ask, self._call(_TEXT)]
        if any(self._loses(_CALL, [*start, *rest]) for start in (bare, beside) for rest in ([], [result])):
            drops.add("tool_calls")
        elif self._loses(_TEXT, [*beside, result]):
            drops.add("content")
        after_call: list[Message] = [ask, self._call()]
        if "tool_calls" in drops:
            after_call = [ask, {"role": "assistant", "content": tool_call_text(_call_message()["tool_calls"][0])}]
        if self._loses(_RESULT, [*after_call, result]):
            drops.add("tool")
        if "tool_calls" in drops:
            thought: Message = {**after_call[1], "reasoning_content": _REASON}
        else:
            thought = self._call("", _REASON)
        follow = [] if "tool" in drops else [result]
        if self._loses(_REASON, [ask, thought, *follow]) and self._loses(_REASON, [ask, thought]):
            drops.add("reasoning")
            written: Message = {"role": "assistant", "content": think_block(_REASON) + _TEXT}
            if self._loses(_REASON, [ask, written]):
                drops.add("any reasoning")
        if self._loses(_TOOL, [ask], _TOOLS):
            drops.add("tools")
        self.drops = frozenset(drops)
        self.closes_thinking = self._thinking_switch([ask, {"role": "assistant", "content": _TEXT}, ask])

    def _call(self, content: str = "", reasoning: str | None = None) -> Message:
        message = _call_message(content, reasoning)
        if self.text_arguments:
            message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return message

    def _try(self, messages: list[Message], tools: list[Any] | None = None) -> str | None:
        """The probe's text, or None when the template refuses it (a record like it will get the template's words)."""
        try:
            return self.render(messages, tools, prompt=False)
        except RolloutError:
            return None

    def _loses(self, sentinel: str, messages: list[Message], tools: list[Any] | None = None) -> bool:
        text = self._try(messages, tools)
        return text is not None and sentinel not in text

    def _thinking_switch(self, messages: list[Message]) -> bool:
        """Whether ``enable_thinking=False`` changes the generation prompt only."""
        template = self.tokenizer.chat_template
        source = "".join(template.values()) if isinstance(template, dict) else str(template)
        if "enable_thinking" not in source:
            return False
        plain = self._try(messages)
        if plain is None:
            return False
        return self.render(messages, None, prompt=True, thinking=False).startswith(plain)
