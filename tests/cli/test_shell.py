"""The command in a shell: completion, help that fits, exit codes in one place."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tieredmoe.cli import exit_codes
from tieredmoe.cli.app import app

COMMAND = [sys.executable, "-c", "from tieredmoe.cli import main; main()"]


def shell(**variables):
    return subprocess.run(
        COMMAND, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_a_script_for_the_shell_is_produced(name):
    done = shell(_TIEREDMOE_COMPLETE=f"source_{name}")
    assert done.returncode == 0, done.stderr
    assert "_TIEREDMOE_COMPLETE" in done.stdout
    assert "tieredmoe" in done.stdout


def test_the_script_is_answered_with_commands_and_options():
    def completed(words):
        done = shell(
            _TIEREDMOE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))
        )
        return done.stdout.split()

    assert completed("tieredmoe pack ve") == ["verify"]
    assert completed("tieredmoe pack in") == ["inspect"]
    assert completed("tieredmoe pack verify --sa") == ["--sample"]


def test_the_options_that_install_it_are_there():
    out = CliRunner().invoke(app, ["--help"]).output
    assert "--install-completion" in out
    assert "--show-completion" in out


def test_help_explains_every_exit_code():
    out = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    codes = [exit_codes.DONE, exit_codes.FAILED, exit_codes.WRONG_USAGE, exit_codes.INTERRUPTED]
    for code in codes:
        assert f"{code} " in exit_codes.EXPLAINED
    assert exit_codes.EXPLAINED in out


@pytest.mark.parametrize(
    "command",
    ["inspect", "plan", "check", "create", "verify", "restore", "split", "mirror", "attach"],
)
def test_every_command_has_a_help_text_that_says_what_it_does(command):
    result = CliRunner().invoke(app, ["pack", command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert len(result.output.split()) > 30


def test_the_command_starts_without_torch():
    """It takes seconds to import, and copying bytes does not need it."""
    code = (
        "import sys; sys.modules['torch'] = None; from tieredmoe.cli import main; main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_planning_for_a_gpu_without_triton_is_one_line_that_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tieredmoe.testing import make_deepseek_v4\n"
        f"path = make_deepseek_v4({str(tmp_path / 'm.gguf')!r})\n"
        "from tieredmoe.cli import main\n"
        f"main(['pack', 'plan', {str(tmp_path / 'm.gguf')!r},\n"
        "      '--vram', '1GiB', '--ram', '1GiB', '--disk-gbps', '12'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install triton" in done.stderr
