"""Also processes that tests start come through here."""

from tests.support.interpreter import prepare

prepare()
