"""Speculative decoding: cheap guesses at the next tokens, checked several at a time.

A step of the model costs little more with eight rows than with one, because it is bound by reading
weights. *Proposers* guess (``lookup``, ``draft_model``), the *controller* says how many guesses are
worth their rows, the *verifier* samples the model's own token at each of them and goes on while
they agree. Noise is keyed by position, so the tokens are the same with and without.
"""
