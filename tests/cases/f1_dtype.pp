# F1: float32 is sent into bfloat16

r0: S F0->1 [f32 4]
r1: R F0<-0 [bf16 4]; F0
