"""megabatch inside other libraries' trainers: one module for each library, imported by its name.

    from megabatch.integrations.sentence_transformers import MegabatchRankingLoss

A module needs torch and, except `pylate` and `colpali`, its library; nothing else imports it.
"""
