"""MindSpeed-RL: its rows."""

from openrl.extension_points import row_shapes

row_shapes.add("MindSpeed-RL", [("question", "labels"), ("question", "answer")])
