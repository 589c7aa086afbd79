"""Has pytest load the suite's plugin."""

pytest_plugins = ("flashzoo_suite.plugin",)
