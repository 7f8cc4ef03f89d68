"""The common parts of all operations, which topics build on.

array          which library an array is of, its shape and strides; other libraries by DLPack
libraries      the adapters of NumPy and CuPy: pointers, allocation, streams
torch_library  the same of torch; torch_tracking sees what torch does around a call, torch_calls has
               the checks and refusals of operators, torch_graphs what torch.compile traces
operation      ``Operation``, the route of a call (torch.compile, other libraries, autograd, or
               straight on); ``Plan``, which calls of one signature share; ``Plans``, its look-up
specs          ``Spec`` declares an array by the names of its axes, its dtype and its strides; all
               arrays of a call are checked against theirs
checks         options as plain numbers, and their ranges
structs        argument structs and constants, read from the CUDA sources that define them
config         ``KernelConfig``, the template arguments of one kernel
launch         ``Launch``: one kernel, its grid and its struct, ready but for the pointers
scratch        memory that the launches of a call share
gpu            facts about the GPUs of each compute capability
"""
