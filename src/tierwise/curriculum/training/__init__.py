"""Train on what was chosen: supervised, by reinforcement, or one after the other.

```
 recipe -> sft ---------------------> evaluate -> training_figures
   |    -> loop: experience (rollouts) -> grpo -> learner      held-out accuracy, report
   |         `--- book: record, checkpoint, curves; budget, deadline
   `----> trl_backend (trl_stage, trl_data): the same stages through TRL's trainers
```

`lora` and `recompute` change what is trained and what is kept; they work in both stages.
"""
