"""EasyR1: its rows."""

from openrl.extension_points import row_shapes

row_shapes.add("EasyR1", [("problem", "answer")])
