"""The parts of the publisher (`cwtrain.hotload.publisher`), from pure decisions to input and output.

| module | is |
| --- | --- |
| `names.py` | from a run, an epoch and a version to an identity, and back |
| `state.py` | what the publisher knows, as plain data, and how that changes: pure |
| `decide.py` | what is done about a version, from the state alone: pure, the one place |
| `journal.py` | the state on the disk, crash-safe |
| `look.py` | what a trainer's directory holds |
| `epochs.py` | who may publish under a run id, and in which epoch: one object in the bucket for each |
| `follow.py` | the mirror kept at the trainer's last version |
| `send.py` | one attempt to bring a snapshot into the deployment, and what is done about outages |
| `opening.py` | an epoch for a version that came without a baseline call; whether the run was taken over |
| `baseline.py` | the base checkpoint, published once |
| `numbered.py` | one numbered version from the trainer's call to the acknowledgement |
| `tensors.py` | the same for tensors that no directory holds |
| `plan.py` | how several ranks write one version together |
| `outcome.py` | what a call says that it did |
| `report.py` | the metrics under `hotload/` |
| `housekeeping.py` | the trainer's directories that nobody needs any more; the note beside its checkpoint |
"""
