"""How good a model is on a text, and what two models differ in."""
