"""The spine of Tare: the recipe, the numbers, and the order in which things happen."""

__version__ = "0.1.0"
