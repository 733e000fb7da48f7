"""What training may learn beside the frozen codes. One file per learnable; a new one is a new file.

A learnable changes one kind of stored tensor, its PART (`bias`, `scale`, `zero`, `codes`, `norm`; see `qat.parts`). It
owns one flat float32 parameter `delta` that starts at 0, with a number per value of the part (PER = "value") or per
output channel (PER = "row"), and states

    VERSION, DTYPES         as every plugin: raised when results change; the weight dtypes it works for
    NEEDS_ZERO              True when it needs stored zero points (asymmetric formats)
    Options                 a Section with at least `rate`, the peak learning rate
    apply(value, delta, unit) -> Tensor
                            the part's value (rows, columns) with `delta` (rows, columns or 1) applied. unit: float32,
                            shaped as value, or 1.0; set by `begin`
    BYTES_PER_WEIGHT        optional: of memory that it takes beside the model while training, for `tare plan`
    check(options, length, slots)
                            optional: raises ValueError, which names the option, for windows of so many tokens or the
                            linears of a block whose bias the engines load; asked before anything is calibrated
    begin(student, options, windows)
                            optional: sets units, starts or deltas before the first step, from token ids (num, length);
                            a function of its arguments alone, since a resumed run calls it again

Several learnables of one part are applied in the order of their names; the part is rounded once, after all of them.
"""
