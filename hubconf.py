"""Every model for `torch.hub`: `torch.hub.load("OWNER/locality", "convit_tiny", pretrained=True)`.

`torch.hub.load("path/to/clone", "cvt_13", source="local", num_classes=10)` takes a clone. Options
are those of `locality.create_model`.
"""

import functools
import pathlib
import sys

# torch.hub puts the repository's root on the path, and the package lies below src/.
sys.path.insert(0, str(pathlib.Path(__file__).parent / "src"))

import locality

for _name in locality.list_models():
    globals()[_name] = functools.partial(locality.create_model, _name)
    globals()[_name].__doc__ = f"The model `{_name}`; options as of `locality.create_model`."
