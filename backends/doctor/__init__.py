"""Pre-flight checks of a host: what would make a launch or an extraction fail, be slow, or lose data.

`report.py` has what is asked and answered, `examine.py` puts the questions; the other files are the checks, by what
they look at. Every check only reads. What has to use disk or GPUs to know is measured by a job (`capture/measure.py`)
that a person asks for, and judged in `measured.py`.
"""
