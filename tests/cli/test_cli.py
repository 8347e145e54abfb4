"""The command line as a user meets it: files, exit codes, sentences."""

import importlib.util
import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from charts import figures
from child import call
from PIL import Image

from podracer import recipes
from podracer.cli.commands import COMMANDS
from podracer.cli.main import main, usage
from podracer.cli.recipe_flags import find_recipe
from podracer.io import entry_points


def call_here(capsys, *arguments):
    """What `call` returns, of a command in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main(list(map(str, arguments)))
    return leaving.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    code, out, error = call(
        "train", "catch_a2c", "--frames", 409_600, "--seed", 3, "--run-dir", directory,
        "--devices", 2,
    )  # fmt: skip
    assert code == 0, error
    assert "Finished" in out
    return directory


@pytest.mark.figure(17)
@pytest.mark.usefixtures("nothing_listens")
def test_eval_prints_what_training_measured(run, capsys):
    code, out, error = call_here(capsys, "eval", run, "--checkpoint", "best", "--json")
    assert code == 0, error
    figures = json.loads(out)
    assert figures["episodes"] == 100
    assert figures["return_mean"] > 0.9
    evaluations = {
        record["updates"]: record["evaluation_return"]
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "evaluation_return" in record
    }
    assert figures["return_mean"] == pytest.approx(max(evaluations.values()))
    assert figures["return_mean"] == pytest.approx(evaluations[figures["updates"]])


@pytest.mark.figure(17)
@pytest.mark.usefixtures("nothing_listens")
def test_play_draws_the_board(run, tmp_path, capsys):
    out = tmp_path / "catch.gif"
    code, _, error = call_here(capsys, "play", run, "--out", out, "--episodes", 2)
    assert code == 0, error
    with Image.open(out) as image:
        assert image.n_frames >= 10  # frames that do not change are merged
        assert image.size == (120, 240)
        assert np.asarray(image.convert("RGB")).max() > 200


@pytest.mark.figure(17)
@pytest.mark.usefixtures("nothing_listens")
def test_report_is_one_file_without_addresses(run, capsys):
    code, out, error = call_here(capsys, "report", run)
    assert code == 0, error
    page = (run / "report.html").read_text()
    assert out.strip() == str(run / "report.html")
    page = re.sub("<script>.*?</script>", "", page, flags=re.DOTALL)
    assert len(figures(page)) >= 3
    assert "://" not in page


@pytest.mark.figure(17)
@pytest.mark.usefixtures("nothing_listens")
def test_fingerprint_is_of_the_whole_state(run, capsys):
    code, out, error = call_here(capsys, "fingerprint", run)
    assert code == 0, error
    assert re.fullmatch(r"[0-9a-f]{64}  .* at update 200\n", out)
    assert call_here(capsys, "fingerprint", run, "--checkpoint", "200") == (0, out, "")
    code, _, error = call_here(capsys, "fingerprint", run, "--checkpoint", "199")
    assert code == 65
    assert "199" in error


@pytest.mark.figure(17)
@pytest.mark.usefixtures("nothing_listens")
def test_list_and_usage_name_everything(capsys):
    code, out, _ = call_here(capsys, "list")
    assert code == 0
    for word in ("agents:", "PPO", "recipes:", "cartpole_ppo", "environments:", "catch"):
        assert word in out
    for name in COMMANDS:
        assert f"podracer {name}" in usage()


def test_a_list_names_settings_as_flags(capsys, monkeypatch):
    def from_data():
        """Learn from data: `environment="data:FILE.npz"`."""

    monkeypatch.setitem(recipes.RECIPES, "from_data", from_data)
    assert "from data: --environment data:FILE.npz.\n" in call_here(capsys, "list", "recipes")[1]


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("trian",)])
def test_what_needs_no_jax_does_not_import_it(words):
    program = f"""
import sys
import podracer
from podracer.cli.main import main
try:
    main({words!r})
except SystemExit:
    assert not {{"jax", "numpy", "rich"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.figure(17)
@pytest.mark.usefixtures("nothing_listens")
def test_doctor_finds_that_everything_works():
    code, out, _ = call("doctor")
    assert code == 0, out
    assert out.count("works") >= 3


@pytest.mark.figure(20)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("catch", "--num-envs", "10", "--devices", "4"), "in a new run 8 or 12"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("cartpole_dqn", "--capacity", "2000000000"), "GiB are free: take a smaller"),
                (("catch", "--devices", "10000"), "more than the 1,024 that a process may have"),
            )
        ),
    ],
)
def test_mistakes_about_devices(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = call("train", *arguments)
    assert code == 78, error
    assert message in out + error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_checkpoint_is_code_65(tmp_path, run, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((run / "config.json").read_text())
    (broken / "checkpoints").mkdir()
    for command in ("eval", "fingerprint"):
        code, _, error = call_here(capsys, command, broken)
        assert code == 65, error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("recipe", "flags", "found"),
    [
        ("cartpole_sebulba", ["--environment", "gymnasium:maze_of_mine:Maze-v0"], True),
        ("cartpole_sebulba", [], False),
    ],
)
def test_a_module_in_the_working_directory_is_found_only_where_a_flag_names_one(
    recipe, flags, found, tmp_path, monkeypatch
):
    """Elsewhere a folder there, such as wandb's `wandb/`, would be taken for a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "maze_of_mine.py").touch()
    find_recipe(recipe, flags)
    assert (importlib.util.find_spec("maze_of_mine") is not None) == found


COMPLETIONS = [
    ("tra", "train"),
    ("train cartpole_p", "cartpole_ppo cartpole_pqn"),
    ("train cartpole_ppo --lear", "--learning-rate"),
    ("train cartpole_ppo --no-keep", "--no-keep-best"),
    ("train cartpole_ppo --frames 10 --torso ", "CNN MLP ResNet"),
    ("train catch_a2c --arch S", "Sebulba"),
    ("train atari_impala --ga", "--game"),
    ("eval run --ep", "--episodes --epsilon"),
    ("resume run --max", "--max-seconds"),
    ("train maz", "maze_of_mine"),
    ("train maze_of_mine --lear", "--learning-rate"),
    ("eval ", ""),  # bash then completes files
]


def test_a_shell_completes_commands_recipes_flags_and_choices(capsys, monkeypatch, tmp_path):
    """Of the library and of packages, as far as these work."""

    def find(group):
        mine = EntryPoint("maze_of_mine", "podracer.recipes.catch:catch_a2c", group)
        broken = EntryPoint("maze_of_others", "podracer.recipes.catch:missing", group)
        return [mine, broken] if group == "podracer.recipes" else []

    monkeypatch.setattr(entry_points, "entry_points", find)
    with pytest.raises(SystemExit):
        main(["completion"])
    script = tmp_path / "podracer.bash"
    script.write_text(capsys.readouterr().out)
    code = f"source {script}\n"
    for line, _ in COMPLETIONS:
        words = " ".join(f"'{word}'" for word in ["podracer", *line.split(" ")])
        count = len(line.split(" "))
        code += f"COMP_WORDS=({words}) COMP_CWORD={count}; _podracer; echo ${{COMPREPLY[@]}}\n"
    said = subprocess.run(["bash", "-c", code], check=True, capture_output=True, text=True)
    assert said.stderr == ""
    assert said.stdout.splitlines() == [words for _, words in COMPLETIONS]
