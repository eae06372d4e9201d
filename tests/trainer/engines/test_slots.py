"""Bookkeeping of slots: what is reserved, copied, waited for, kept aside and forgotten."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trace_fast.trainer.engines.slot_attention import SlotStore
from trace_fast.trainer.engines.slots import LEAST_SHARED, Place, SlotBook

LENGTH = 400


def ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, n)


@pytest.fixture
def store() -> SlotStore:
    """Four slots, one layer of one head of dim 1: a key is its slot's number, until it is copied."""
    store = SlotStore(4, LENGTH)
    keys, values = store.layer(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    for slot in range(4):
        keys[slot], values[slot] = slot, -slot
    return store


def put(book: SlotBook, slot: int, prompt: np.ndarray) -> Place:
    """A prompt that is computed at once."""
    book.begin_round()
    place = book.place(prompt, slot)
    book.join(place)
    book.computed(slot, len(prompt))
    return place


def test_a_continuation_gets_its_slot_back(store):
    book = SlotBook(store, 0)
    a, b = ids(100, 1), ids(100, 2)
    put(book, 0, a)
    put(book, 1, b)
    book.append(np.array([1]), np.array([100]), np.array([7]))
    longer = np.concatenate([b, [7, 8, 9]])
    book.release(0)
    book.release(1)
    # a's own prompt again would not leave a token to run, so nothing is reserved for it
    assert book.reserve([ids(50, 3), longer, np.append(a, 5), a, np.append(a, 6)]) == {1: 1, 2: 0}
    assert book.place(longer, 1).reused == 101


def test_the_longest_prefix_is_copied(store):
    book = SlotBook(store, 0)
    prompt = ids(120)
    put(book, 1, prompt[:60])
    put(book, 2, prompt[:90])
    place = put(book, 3, prompt)
    assert (place.reused, place.after) == (90, None)
    keys, values = store.layer(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    source = torch.tensor([1.0] * 60 + [2.0] * 30 + [3.0] * (LENGTH - 90))  # slot 2 had its first 60 from slot 1
    assert torch.equal(keys[3, 0, :, 0], source)
    assert torch.equal(values[3, 0, :, 0], -source)


def test_alike_prompts_of_a_round_wait_in_waves(store):
    book = SlotBook(store, 0)
    system, first, second = ids(100, 1), ids(50, 2), ids(50, 3)
    a, b = np.concatenate([system, first]), np.concatenate([system, second])
    book.begin_round()
    places = [book.place(prompt, slot) for slot, prompt in enumerate([a, a, b, b])]
    assert [(p.wave, p.after, p.shared if p.after is not None else None) for p in places] == [
        (0, None, None), (1, 0, 149), (1, 0, 100), (2, 2, 149),
    ]  # fmt: skip
    assert [p.reused for p in places] == [0] * 4
    assert book.join(places[0]) == 0
    book.computed(0, 150)
    assert [book.join(p) for p in places[1:3]] == [149, 100]
    book.discard(2)  # what it waited for failed
    assert book.join(places[3]) == 0


def test_less_than_is_worth_it_is_not_copied(store):
    book = SlotBook(store, 0)
    prompt = ids(100)
    put(book, 0, prompt)
    other = np.concatenate([prompt[: LEAST_SHARED - 1], ids(50, 9)])
    assert put(book, 1, other).reused == 0
    assert put(book, 2, np.concatenate([prompt[:LEAST_SHARED], ids(50, 9)])).reused == LEAST_SHARED


def test_slots_used_longest_ago_go_first(store):
    book = SlotBook(store, 0)
    for slot in range(3):
        put(book, slot, ids(40, slot))
    for slot in (1, 0, 2):
        book.release(slot)
    order = []
    while (slot := book.free_slot()) is not None:
        order.append(slot)
        put(book, slot, ids(40, 10 + slot))
    assert order == [3, 1, 0, 2]


def test_what_loses_its_slot_is_kept_aside(store):
    book = SlotBook(store, 150)
    first, second, third = (ids(70, n) for n in range(3))
    put(book, 0, first)
    book.release(0)
    put(book, 0, second)
    assert book.tokens_aside == 70
    book.release(0)
    put(book, 0, third)
    assert book.tokens_aside == 140
    assert put(book, 2, np.append(first, 5)).reused == 70
    assert book.tokens_aside == 70  # its continuation took it over
    keys, _ = store.layer(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    assert keys[2, 0, :70].eq(0).all()


def test_the_oldest_goes_when_too_much_is_aside(store):
    book = SlotBook(store, 150)
    prompts = [ids(70, n) for n in range(4)]
    for prompt in prompts:
        put(book, 0, prompt)
        book.release(0)
    assert book.tokens_aside == 140
    assert put(book, 1, np.append(prompts[0], 5)).reused == 0
    assert put(book, 2, np.append(prompts[1], 5)).reused == 70


def test_forget(store):
    book = SlotBook(store, 300)
    prompt = ids(70)
    put(book, 0, prompt)
    book.release(0)
    put(book, 0, ids(70, 1))
    book.forget()
    assert book.tokens_aside == 0
    assert book.reserve([np.append(prompt, 5)]) == {}
    assert put(book, 1, np.append(prompt, 5)).reused == 0
    assert book.free_slot() is not None


def test_a_discarded_slot_holds_nothing_and_no_nan(store):
    book = SlotBook(store, 300)
    prompt = ids(70)
    put(book, 0, prompt)
    keys, _ = store.layer(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    keys[0, 0, 3] = float("nan")
    book.discard(0)
    assert keys[0].eq(0).all()
    assert put(book, 1, np.append(prompt, 5)).reused == 0
