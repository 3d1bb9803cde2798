"""Models that are pipelines: stages that hand tensors on, and what is kept of them.

Glossary:
    stage           one model, or one function, of a pipeline
    output          a named tensor that a stage hands on
    row             one token's part of an output; `frames(n)` outputs have n rows a token
    watermark       how many tokens of a request have had their rows handed on
    condition       what a stage is given beside token ids: rows from the stage before
"""
