"""Pipeline parallelism: schedules as data, checked, simulated, drawn and run.

| file        | does                                                                                        |
|-------------|---------------------------------------------------------------------------------------------|
| schedule    | `Action`, `Schedule`, and their text                                                        |
| straight,   | the schedules, as pure functions: one stage a rank, several around and around, two in a V   |
| looped,     |                                                                                             |
| v_shaped    |                                                                                             |
| catalogue   | the schedules by name, and `make`, which refuses what does not fit                          |
| split       | which layers each stage holds                                                               |
| lower       | from actions to messages on lanes; `check` proves that a schedule runs to its end           |
| simulate    | when each action begins and ends, what waits, what is held                                  |
| draw        | timelines as text, SVG, PNG; `python -m megalite.pipeline` (command) prints them            |
| post        | the messages of one rank: posted ahead, held until taken                                    |
| execute     | `Pipeline`, which runs any schedule over a rank's stages                                    |

All but the last two cost no import of torch.
"""
