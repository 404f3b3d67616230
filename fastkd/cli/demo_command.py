"""`fastkd demo`, for a classifier or a language model."""

from rich.console import Console

from fastkd.cli import demo, demo_text
from fastkd.cli.command_settings import DemoSettings


def run(settings: DemoSettings, console: Console) -> None:
    """Run the demo of --task."""
    (demo_text if settings.task == demo_text.TASK else demo).run_demo(settings, console)
