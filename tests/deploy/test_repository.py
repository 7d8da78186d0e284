"""Which models are served together, and the repository that is put together from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import repository
from deploy.errors import UserError
from deploy.repository import (
    DEFAULT_REPOSITORY,
    Model,
    chosen_profiles,
    compose,
    render,
    set_decoupled,
    with_unary_twins,
)

PBTXT = 'backend: "python"\nmodel_transaction_policy {\n  decoupled: True\n}\ninput [ { name: "decoupled_hint" } ]\n'
OURS = 'name: "{name}"\nbackend: "python"\nparameters {{ key: "role" value: {{ string_value: "{role}" }} }}\n'


def add_model(directory: Path, name: str, text: str) -> Path:
    model = directory / name
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(text)
    (model / "1" / "model.py").write_text("# model\n")
    return model


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A repository of the user's own that has nothing to do with this project."""
    source = tmp_path / "repository"
    add_model(source, "streams", PBTXT)
    add_model(source, "plain", 'backend: "python"\n')
    (source / "README").write_text("no model\n")
    return source


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles `words` (no name in common with the default one), `more` (one with words), `other` (one with the default)."""
    directory = tmp_path / "profiles"
    add_model(directory / "words", "word_model", OURS.format(name="word_model", role="words"))
    add_model(directory / "more", "word_model", OURS.format(name="word_model", role="more"))
    add_model(directory / "other", "tensorrt_llm", OURS.format(name="tensorrt_llm", role="other"))
    monkeypatch.setattr(repository, "PROFILES", directory)
    return directory


def names(models: list[Model]) -> list[str]:
    return sorted(model.name for model in models)


def rendered(chosen: str, target: Path, *own: Path) -> Path:
    return render(compose(chosen_profiles(chosen), own), target, decoupled=True)


DEFAULT = ["ensemble", "everbatch", "tensorrt_llm", "tensorrt_llm_bls"]


def test_without_a_choice_the_default_repository_is_served_as_it_lies(tmp_path: Path) -> None:
    models = compose(())
    assert set(DEFAULT) <= set(names(models))
    assert render(models, tmp_path / "models", decoupled=True) == DEFAULT_REPOSITORY
    assert not (tmp_path / "models").exists()


def test_a_profile_is_served_with_the_owner_of_the_engine_and_the_own_wire(profiles: Path, tmp_path: Path) -> None:
    served = rendered("words", tmp_path / "models")
    assert sorted(path.name for path in served.iterdir()) == ["everbatch", "tensorrt_llm", "word_model"]
    assert (
        served / "tensorrt_llm" / "1" / "model.py"
    ).resolve() == DEFAULT_REPOSITORY / "tensorrt_llm" / "1" / "model.py"
    assert 'string_value: "words"' in (served / "word_model" / "config.pbtxt").read_text()


def test_the_owner_has_another_name_where_a_profile_takes_its_own(profiles: Path, tmp_path: Path) -> None:
    served = rendered("other", tmp_path / "models")
    assert sorted(path.name for path in served.iterdir()) == ["everbatch", "everbatch_engine", "tensorrt_llm"]
    owner = (served / "everbatch_engine" / "config.pbtxt").read_text()
    assert 'name: "everbatch_engine"' in owner and 'string_value: "tensorrt_llm"' in owner
    assert 'string_value: "other"' in (served / "tensorrt_llm" / "config.pbtxt").read_text()
    assert 'name: "tensorrt_llm"' in (DEFAULT_REPOSITORY / "tensorrt_llm" / "config.pbtxt").read_text()  # untouched


def test_several_profiles_are_served_side_by_side(profiles: Path) -> None:
    assert {*DEFAULT, "word_model"} <= set(names(compose(chosen_profiles("trtllm, words"))))


def test_a_collision_names_the_model_and_both_profiles(profiles: Path) -> None:
    with pytest.raises(
        UserError, match="model tensorrt_llm is in profile trtllm and in profile other too; serve one"
    ) as error:
        compose(chosen_profiles("trtllm,other"))
    assert "\n" not in str(error.value)


def test_all_is_every_profile_whose_names_are_free(profiles: Path) -> None:
    assert chosen_profiles("all") == ("trtllm", "more")  # `words` has a name of `more`, `other` one of the default
    (profiles / "more" / "word_model").rename(profiles / "more" / "another_model")
    assert chosen_profiles("all") == ("trtllm", "more", "words")


def test_an_unknown_profile_is_answered_with_those_that_there_are(profiles: Path) -> None:
    with pytest.raises(UserError, match="no profile 'nope'; give --profile some of trtllm, more, other, words, all"):
        chosen_profiles("trtllm,nope")


def test_what_all_chooses_here_can_be_served_together() -> None:
    assert set(DEFAULT) <= set(names(compose(chosen_profiles("all"))))


@pytest.mark.parametrize("profile", repository.profiles())
def test_every_profile_of_this_project_is_served_with_one_owner(profile: str) -> None:
    models = compose((profile,))
    assert [model.role for model in models].count("tensorrt_llm") == 1
    assert "everbatch" in names(models)


def test_a_repository_of_somebody_else_is_served_alone(plain: Path) -> None:
    assert names(compose((), [plain])) == ["plain", "streams"]


def test_repositories_stand_beside_profiles_and_beside_each_other(plain: Path, tmp_path: Path) -> None:
    add_model(tmp_path / "second", "third", PBTXT)
    assert {*DEFAULT, "plain", "streams", "third"} <= set(names(compose(("trtllm",), [plain, tmp_path / "second"])))


def test_a_copy_of_a_model_under_another_name_is_served_under_it(tmp_path: Path) -> None:
    source = tmp_path / "own"
    add_model(source, "my_llm", (DEFAULT_REPOSITORY / "ensemble" / "config.pbtxt").read_text())
    served = rendered("", tmp_path / "models", source)
    assert sorted(path.name for path in served.iterdir()) == ["everbatch", "my_llm", "tensorrt_llm"]
    text = (served / "my_llm" / "config.pbtxt").read_text()
    assert text.startswith("#") and 'name: "my_llm"\n' in text and 'string_value: "ensemble"' in text
    assert 'name: "ensemble"' in (source / "my_llm" / "config.pbtxt").read_text()  # the source is untouched


def test_a_copy_of_the_owner_under_another_name_is_the_owner(tmp_path: Path) -> None:
    add_model(tmp_path / "own", "my_engine", (DEFAULT_REPOSITORY / "tensorrt_llm" / "config.pbtxt").read_text())
    assert names(compose((), [tmp_path / "own"])) == ["everbatch", "my_engine"]


def test_tensors_are_read_and_a_configuration_without_any_is_left_to_its_backend(tmp_path: Path) -> None:
    (ensemble,) = (model for model in compose(()) if model.name == "ensemble")
    assert {"text_input", "max_tokens", "text_output"} <= ensemble.tensors and "ensemble" not in ensemble.tensors
    bare = Model("bare", add_model(tmp_path, "bare", 'backend: "vllm"\n# input [ { name: "text_input" } ]\n'), "here")
    assert bare.tensors == set() and bare.backend == "vllm"


def test_the_bytecode_of_the_models_is_there_before_a_stub_writes_it(tmp_path: Path) -> None:
    """Triton takes a directory that has changed for a changed model, and unloads it at the next load of any."""
    model = add_model(tmp_path, "some", PBTXT) / "1" / "model.py"
    repository.compile_models([Model("some", tmp_path / "some", "here")])
    before = model.parent.stat().st_mtime_ns
    subprocess.run(
        [sys.executable, "-c", "import model"], cwd=model.parent, check=True, env={"PYTHONPATH": str(model.parent)}
    )
    assert model.parent.stat().st_mtime_ns == before and list(model.parent.glob("__pycache__/*.pyc"))


def test_bytecode_that_is_fresh_stays_as_it_is_for_the_server_that_serves_from_the_same_directory(
    tmp_path: Path,
) -> None:
    model = add_model(tmp_path, "some", PBTXT) / "1" / "model.py"
    models = [Model("some", tmp_path / "some", "here")]
    repository.compile_models(models)
    (compiled,) = model.parent.glob("__pycache__/*.pyc")
    was = (compiled.stat(), compiled.parent.stat().st_mtime_ns)
    repository.compile_models(models)
    assert (compiled.stat(), compiled.parent.stat().st_mtime_ns) == was
    os.utime(model, (1, 1))
    repository.compile_models(models)
    assert compiled.stat().st_mtime_ns != was[0].st_mtime_ns


def test_a_decoupled_repository_is_served_as_it_is(plain: Path, tmp_path: Path) -> None:
    assert render(compose((), [plain]), tmp_path / "copy", decoupled=True) == plain
    assert not (tmp_path / "copy").exists()


def test_a_repository_whose_path_triton_does_not_take_is_served_through_links(plain: Path, tmp_path: Path) -> None:
    moved = plain.rename(tmp_path / "my modèles")
    copy = render(compose((), [moved]), tmp_path / "copy", decoupled=True)
    assert copy == tmp_path / "copy"
    for name in ("plain", "streams"):
        assert (copy / name / "config.pbtxt").read_text() == (moved / name / "config.pbtxt").read_text()


def test_unary_mode_rewrites_every_policy_in_a_copy_and_links_the_rest(plain: Path, tmp_path: Path) -> None:
    copy = render(compose((), [plain]), tmp_path / "copy", decoupled=False)
    assert sorted(path.name for path in copy.iterdir()) == ["plain", "streams"]
    text = (copy / "streams" / "config.pbtxt").read_text()
    assert "decoupled: false" in text and "True" not in text and "decoupled_hint" in text
    assert (copy / "plain" / "config.pbtxt").read_text() == 'backend: "python"\n'
    assert (copy / "streams" / "1" / "model.py").resolve() == plain / "streams" / "1" / "model.py"
    assert "decoupled: True" in (plain / "streams" / "config.pbtxt").read_text()  # the source is untouched


def test_rendering_again_replaces_the_former_copy(plain: Path, tmp_path: Path) -> None:
    render(compose((), [plain]), tmp_path / "copy", decoupled=False)
    (plain / "plain" / "config.pbtxt").unlink()
    copy = render(compose((), [plain]), tmp_path / "copy", decoupled=False)
    assert [path.name for path in copy.iterdir()] == ["streams"]


def test_a_repository_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        compose((), [tmp_path])
    with pytest.raises(UserError, match="is no directory"):
        compose((), [tmp_path / "missing"])


@pytest.mark.parametrize("model", compose(()), ids=lambda model: model.name)
def test_every_model_can_be_made_unary_but_those_whose_protocol_streams(model: Model) -> None:
    text = (model.directory / "config.pbtxt").read_text()
    assert ("decoupled: false" in set_decoupled(text, False)) == (model.name != "everbatch")


# ---- unary twins ----------------------------------------------------------------------------------------------------


def test_each_model_that_streams_is_served_for_unary_clients_under_a_second_name(tmp_path: Path) -> None:
    models = with_unary_twins(compose(chosen_profiles("trtllm")))
    twins = {"ensemble_unary", "tensorrt_llm_bls_unary", "tensorrt_llm_unary"}
    assert {name for name in names(models) if name.endswith("_unary")} == twins, "what has one policy has no twin"
    served = render(models, tmp_path / "models", decoupled=True)
    for name in twins:
        first = (served / name.removesuffix("_unary") / "config.pbtxt").read_text()
        text = (served / name / "config.pbtxt").read_text()
        assert f'name: "{name}"\n' in text and "decoupled: false" in text and "decoupled: true" in first
        assert (served / name / "1" / "model.py").is_file()
    assert {model.name for model in models if model.streams(True)} == {*set(DEFAULT)}


def test_a_twin_whose_name_is_taken_is_one_sentence(tmp_path: Path) -> None:
    add_model(tmp_path, "ensemble_unary", OURS.format(name="ensemble_unary", role="ensemble"))
    with pytest.raises(
        UserError, match="^model ensemble_unary is in model repository .* and in triton.decoupled=both for"
    ):
        with_unary_twins(compose(("trtllm",), [tmp_path]))


def test_models_of_somebody_else_have_no_twins(plain: Path) -> None:
    assert names(with_unary_twins(compose((), [plain]))) == ["plain", "streams"]


# ---- what streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "streams"),
    [
        ("model_transaction_policy { decoupled: true }", (True, False)),
        ("model_transaction_policy { decoupled: True }  # prescribed by its protocol", (True, True)),
        ("model_transaction_policy {\n  decoupled: false\n}", (False, False)),
        ("# decoupled: true", (False, False)),
        ('backend: "vllm"', (True, True)),
    ],
)
def test_a_model_streams_as_its_configuration_says_once_it_is_served(
    tmp_path: Path, policy: str, streams: tuple[bool, bool]
) -> None:
    add_model(tmp_path, "mine", policy)
    model = Model("mine", tmp_path / "mine", "here")
    assert (model.streams(True), model.streams(False)) == streams
