"""How a training run is set up, beside its model and batch: for plans of steps that do not run.

Enters: a model, the optimizer's name, and a `TrainingSetup` in the user's words. Leaves: a copy of
the model that holds what the run would hold, and what was assumed of it, in sentences.
"""
