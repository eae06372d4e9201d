"""The tokenizer of the small policy, trained on practice worlds: a byte-level BPE of about a thousand tokens.

What is copied has the same ids wherever it stands: a word is encoded with one space before it also where none was
written, at the start of a line, of a query, or behind a tag such as ``<answer>``, and where several were. Decoding
writes that space, so decoded text differs in spaces from what was encoded; a query or an answer means the same with it.
Capitalised words are cut after their second vowel, so that an invented name is two tokens a word, of which the first
seldom comes twice in a text; numbers are cut after two digits. What the browser and the call format repeat (addresses,
the head of a call) is kept whole. Tags and control tokens are added tokens, so nothing merges across the seam of opener
and answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trace_fast.trainer.harness.frame import ChatFrame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<answer>", "</answer>", "<think>", "</think>")
INSTRUCTIONS = "Answer the question with the help of the tools:"

# Replaced in this order, after a space was put before the whole.
_SPACED = (("\n", "\n "), (" \n", "\n"), ('"query": "', '"query": " '), ("'", "' "), (Regex(" +"), " "))
_CONSONANT = "[b-df-hj-np-tv-z]"
_PIECES = "|".join(
    (
        r" ?https://[a-z.]+/",
        r" ?\{\"name\": \"[a-z.]+\", \"arguments\": \{\"[a-z]+\": \"?",  # the head of a call with one argument
        r"\"?\}\}",
        r" ?\[[0-9]\]",
        r"\n(?= \S)",
        r"\n ?",
        r" ?[a-z]+",
        rf" ?(?:[AEIOU]|{_CONSONANT.upper()}{_CONSONANT}*[aeiou]+){_CONSONANT}+[aeiou]",  # up to the second vowel
        r" ?[A-Z][a-z]*",
        r" ?[0-9]{1,2}",
        r"\s",
        r"[^\sA-Za-z0-9]",
    )
)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerBase:
    """A tokenizer with at most ``vocabulary`` ids, the control tokens included, and the chat template."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend(" "), *(normalizers.Replace(old, new) for old, new in _SPACED)]
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, model_max_length=10**6)
    tokenizer.chat_template = files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def frame_of(tokenizer: PreTrainedTokenizerBase) -> ChatFrame:
    """The frame with the instructions that the policy was made with; another system message is foreign to it."""
    return ChatFrame(tokenizer, instructions=INSTRUCTIONS)
