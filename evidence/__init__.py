"""The study of what a noise scale is worth: which cheap proxy predicts a measured critical batch size, and how well.

    python -m evidence                    # goes on with what is not done yet: `make study`
    python -m evidence --smoke            # a tiny piece of each kind, nothing is kept
    python -m evidence.figures            # tables and figures from the results

A *study* is a list of pieces of work. Results are one line a piece in `evidence/results/STUDY.jsonl`.
"""
