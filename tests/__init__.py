"""Tests; processes that tests start import this package too."""

from tests.support.interpreter import prepare

prepare()
