"""The process that runs the script, as `python …/zeropage/_verify TASK`. See [Note: the plain process]."""

import importlib.util
import pathlib
import sys

if __name__ == "__main__":
    folder = pathlib.Path(__file__).resolve().parent
    sys.path.pop(0)  # this folder
    name = "zeropage_verify"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    importlib.import_module(f"{name}.child").main(pathlib.Path(sys.argv[1]))
