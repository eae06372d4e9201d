"""Docworld: a generated closed world to learn searching in.

People, cities, firms, works, prizes and lands, their relations spread over short documents among distractors, and
questions that need two to six of the documents. Everything follows from a seed; names and texts are invented.

    world = make_world(seed=0, size="small")
    world.documents                 # docid, url, title, text
    world.questions("train")        # question, answers, template, hops, support, ...
    write_world(world, "docworld")  # the same as JSONL files
"""

from trace_fast.trainer.docworld.documents import Document
from trace_fast.trainer.docworld.questions import Question, Template
from trace_fast.trainer.docworld.records import write_world
from trace_fast.trainer.docworld.schema import SPLITS, Entity, Fact, Split
from trace_fast.trainer.docworld.world import SIZES, Lookup, World, WorldSize, make_world

__all__ = [
    "SIZES",
    "SPLITS",
    "Document",
    "Entity",
    "Fact",
    "Lookup",
    "Question",
    "Split",
    "Template",
    "World",
    "WorldSize",
    "make_world",
    "write_world",
]
