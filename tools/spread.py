"""pytest plugin that runs each test with a few of its parameters, for each backend."""

import collections
import hashlib


def pytest_addoption(parser):
    parser.addoption("--most", type=int, default=1, help="parameters of a test with a backend")
    parser.addoption("--whole", action="append", default=[], help="a file with all parameters")


def pytest_collection_modifyitems(config, items):
    groups = collections.defaultdict(list)
    for item in items:
        parameters = item.nodeid.partition("[")[2]
        backends = ("triton" in parameters, "torch" in parameters)
        groups[item.nodeid.partition("[")[0], backends].append(item)
    most, whole = config.getoption("most"), config.getoption("whole")
    kept = {item for item in items if item.nodeid.partition("::")[0] in whole}
    for group in groups.values():
        group.sort(key=lambda item: hashlib.md5(item.nodeid.encode()).digest())
        kept.update(group[:most])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
