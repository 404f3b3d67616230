"""Also processes that tests start come through here."""

from tests.interpreter import prepare

prepare()
