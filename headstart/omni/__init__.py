"""Pipelines of models: stages that hand tensors on, and the cache of these tensors.

Glossary:
    stage           one model, or one function, of a pipeline
    output          a named tensor that a stage hands on
    row             one token's part of an output; `frames(n)` outputs have n rows a token
    watermark       how many tokens of a request have had their rows handed on
    condition       a stage's input besides token ids: rows from the stage before
"""
