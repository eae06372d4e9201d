"""``trace-fast export``: the policy of a checkpoint as a model folder, whole or not at all."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from small_world import config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trace_fast.cli_train import run_eval, run_export
from trace_fast.errors import ConfigError, InputError, OutputError
from trace_fast.trainer.config import read_config
from trace_fast.trainer.loop import train
from trace_fast.trainer.setup import open_run, read_inputs


@pytest.fixture(scope="module")
def trained(small_world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Settings of a run of two steps, and its weights at the end."""
    folder = tmp_path_factory.mktemp("trained")
    settings = folder / "config.toml"
    settings.write_text(config(small_world, folder / "out"))
    read = read_config(str(settings), ["training.steps=2", "evaluation.every=0"])
    with open_run(read, read_inputs(read, resume=False)) as (run, begin):
        assert train(run, begin=begin)
        weights = {name: tensor.clone() for name, tensor in run.policy.weights()}
    return settings, weights


def export(settings: Path, out: Path, *changes: str, step: int | None = None, overwrite: bool = False) -> None:
    assert run_export(str(settings), changes, step=step, out=str(out), overwrite=overwrite) == 0


def test_the_newest_checkpoint_is_what_was_trained_and_can_be_evaluated(
    trained: tuple[Path, dict[str, torch.Tensor]],
    small_world: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, weights = trained
    out = tmp_path / "model"
    export(settings, out)
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), name
    text = "Who made The Blue Door?"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(small_world / "base")(text)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    capsys.readouterr()
    assert run_eval(str(settings), [f"policy.path={out}"], questions=None, out=None, overwrite=False) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["reward"] <= 1.1


def test_an_older_step_is_another_policy(trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    settings, weights = trained
    export(settings, tmp_path / "first", step=1)
    first = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "first").named_parameters())
    assert any(not torch.equal(first[name], tensor) for name, tensor in weights.items())


def test_a_step_without_checkpoint_is_refused_with_those_there_are(
    trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    settings, _ = trained
    with pytest.raises(InputError, match=r"step-000009: expected .* there is: step-000001, step-000002"):
        export(settings, tmp_path / "model", step=9)
    with pytest.raises(InputError, match=r"elsewhere/checkpoints: expected .* there is: none"):
        export(settings, tmp_path / "model", f"out={tmp_path / 'elsewhere'}")
    assert not any(tmp_path.iterdir())


def test_nothing_is_replaced_unasked_or_that_is_no_model(
    trained: tuple[Path, dict[str, torch.Tensor]], small_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = trained
    out = tmp_path / "model"
    out.mkdir()
    (out / "letter.txt").write_text("kept")
    with pytest.raises(OutputError, match="model exists; replace it with --overwrite"):
        export(settings, out)
    with pytest.raises(OutputError, match="expected a folder with a model to replace"):
        export(settings, out, overwrite=True)
    assert (out / "letter.txt").read_text() == "kept"
    with pytest.raises(OutputError, match=r"letter.txt/model: cannot be written"):
        export(settings, out / "letter.txt" / "model")
    with pytest.raises(OutputError, match=r"base is policy.path, which the run still needs"):
        export(settings, small_world / "base", overwrite=True)
    monkeypatch.chdir(small_world / "base")
    with pytest.raises(OutputError, match=r"base is policy.path, which the run still needs"):
        export(settings, Path(), overwrite=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="expected one process"):
        export(settings, tmp_path / "other")


def test_what_is_replaced_stays_until_the_new_one_is_there(
    trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, weights = trained
    out = tmp_path / "model"
    export(settings, out, step=1)
    before = (out / "model.safetensors").read_bytes()
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.suffix == ".new":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(settings, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    export(settings, out, overwrite=True)
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_several_chat_templates_are_written_too(
    trained: tuple[Path, dict[str, torch.Tensor]], small_world: Path, tmp_path: Path
) -> None:
    settings, _ = trained
    base = tmp_path / "base"
    shutil.copytree(small_world / "base", base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    templates = {"default": tokenizer.chat_template, "rag": "{{ messages }}"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(base)
    export(settings, tmp_path / "model", f"policy.path={base}")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == templates


def test_a_checkpoint_of_another_policy_is_named(
    trained: tuple[Path, dict[str, torch.Tensor]], small_world: Path, tmp_path: Path
) -> None:
    settings, _ = trained
    base = tmp_path / "base"
    settings_of = AutoConfig.from_pretrained(small_world / "base", num_hidden_layers=1, layer_types=["full_attention"])
    AutoModelForCausalLM.from_config(settings_of).save_pretrained(base)
    AutoTokenizer.from_pretrained(small_world / "base").save_pretrained(base)
    with pytest.raises(InputError, match=r"got another's: model.layers.1.\S+: expected shape None, got \("):
        export(settings, tmp_path / "model", f"policy.path={base}")
    assert not (tmp_path / "model").exists()


def test_a_damaged_checkpoint_leaves_nothing(
    trained: tuple[Path, dict[str, torch.Tensor]], small_world: Path, tmp_path: Path
) -> None:
    settings, _ = trained
    whole = Path(read_config(str(settings)).out) / "checkpoints" / "step-000002"
    copied = tmp_path / "out" / "checkpoints" / "step-000002"
    shutil.copytree(whole, copied)
    for shard in copied.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(InputError, match="step-000002: expected a checkpoint of"):
        export(settings, tmp_path / "model", f"out={tmp_path / 'out'}")
    (copied / "trainer.json").unlink()
    with pytest.raises(InputError, match=r"trainer.json: expected the description of a checkpoint"):
        export(settings, tmp_path / "model", f"out={tmp_path / 'out'}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named_and_leaves_nothing(
    trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    settings, _ = trained
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OutputError, match="model: cannot be written"):
            export(settings, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())
