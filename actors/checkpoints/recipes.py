"""What checkpoints of random weights are made from, by name: for the command line too, which does without torch."""

from typing import Literal

ShapeName = Literal["demo", "tiny", "deepseek-r1-distill-qwen-1.5b", "deepseek-r1-distill-qwen-7b"]
DtypeName = Literal["float32", "bfloat16", "float16"]

RECIPE_FILE = "sleepserve_recipe.json"  # written last; what a directory was made from
