"""The command line: every command, and the one place where errors become exit codes.

A traceback is shown only with PHI4MM_DEBUG=1.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from phi4mm_export.cli import interrupts, render
from phi4mm_export.cli.help import HelpfulCommand
from phi4mm_export.errors import ExitCode, Phi4mmError, UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    # command: (module in phi4mm_export.cli, one-line help)
    "export": ("export", "Turn a checkpoint into a package that ONNX Runtime GenAI runs."),
    "build": ("build", "Build a package by a recipe: export, quantize, judge, describe."),
    "rebuild": ("rebuild", "Build a package again as it records it, and compare every byte."),
    "quantize": ("quantize", "Quantize a graph to 4 or 8 bits, calibrated and judged."),
    "config": ("config", "Write the configuration files for graphs that already stand in a folder."),
    "validate": ("validate", "Judge a package: contract, config, kernels, parity."),
    "verify": ("verify", "Hold a package against its manifest, a lock file and a signature."),
    "diff": ("diff", "Say what differs between two packages or ONNX files, down to single values."),
    "doctor": ("doctor", "Say why a package is refused or answers badly, and correct a copy."),
    "run": ("run", "Generate text from a prompt, images and audio with ONNX Runtime GenAI."),
    "evaluate": ("evaluate", "Measure how much of the float model a package keeps."),
    "inspect": ("inspect", "Say what a checkpoint, a package or an ONNX file is."),
    "plan": ("plan", "Say what a package weighs and what it takes to make and to run, from headers alone."),
    "synth": ("synth", "Write a synthetic checkpoint in the real layout."),
}


class LazyGroup(TyperGroup):
    """Loads a command's module when it is asked for, and turns every exception into a sentence and an exit code.

    Contexts and formatters are `Any`: Typer carries its own copy of click and does not export their classes.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> TyperCommand | None:
        del ctx
        if name not in COMMANDS:
            return None
        return _load(name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (typer.Exit, typer.Abort):
            raise
        except typer.TyperException as err:
            return _leave(_as_usage_error(err), ExitCode.USAGE)
        except Phi4mmError as err:
            return _leave(err, err.exit_code)
        except KeyboardInterrupt as err:
            return _leave(err, ExitCode.INTERRUPTED)
        except MemoryError as err:
            return _leave(err, ExitCode.SYSTEM)
        except BrokenPipeError as err:
            render.hang_up()
            raise typer.Exit(int(ExitCode.SYSTEM)) from err
        except OSError as err:
            return _leave(err, ExitCode.SYSTEM)
        except Exception as err:  # noqa: BLE001 - the only catch-all: what reaches it is our bug
            return _leave(err, ExitCode.BUG)


def _load(name: str) -> TyperCommand:
    module = importlib.import_module(f"phi4mm_export.cli.{COMMANDS[name][0]}")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=HelpfulCommand, help=module.__doc__)(module.command)
    command = typer.main.get_command(single)
    if not isinstance(command, TyperCommand):
        raise TypeError(f"phi4mm_export.cli.{name} does not define one command")
    return command


def _as_usage_error(err: typer.TyperException) -> UsageError:
    """What Typer found wrong with the words of a command, in our form."""
    what = str(getattr(err, "format_message", lambda: err)()).strip().removesuffix(".")
    context = getattr(err, "ctx", None)
    path = context.command_path if context is not None else "phi4mm"
    word = what.partition("No such command ")[2].strip("'")
    near = difflib.get_close_matches(word, COMMANDS, 1) if word else []
    return UsageError(" ".join(what.split()), fix=f"did you mean {near[0]}?" if near else f"see {path} --help")


def _leave(err: BaseException, code: ExitCode) -> None:
    if os.environ.get("PHI4MM_DEBUG") == "1":
        raise err
    render.error(err)
    raise typer.Exit(int(code))


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Turn a Phi-4-multimodal checkpoint into a package that ONNX Runtime GenAI runs.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from phi4mm_export import __version__

        render.text(__version__)
        raise typer.Exit()


def main() -> None:
    """Entry point of the `phi4mm` script: SIGTERM is treated like Ctrl-C (exit 130)."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be no text; in JSON this is an escape
    interrupts.install()
    try:
        sys.exit(app(prog_name="phi4mm"))
    finally:
        interrupts.ignore()
