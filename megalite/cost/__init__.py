"""What a run costs, as arithmetic on its configuration: memory, bytes sent, floating-point operations. No torch.

Everything here is a pure function of plain numbers, so it answers before any memory is taken and any process is
started. What is exact and what is an estimate is said where it is computed.
"""
