# D1: tp 2 × pp 4: shapes travel on the world, activations on the pipeline's group
group pp0 = 0,2,4,6
group pp1 = 1,3,5,7

r0: {S shape->2 @world}; S F0->2
r1: {S shape->3 @world}; S F0->3
r2: {R shape<-0 @world}; R F0<-0; F0; S F0->4
r3: {R shape<-1 @world}; R F0<-1; F0; S F0->5
r4: R F0<-2; F0; S F0->6
r5: R F0<-3; F0; S F0->7
r6: R F0<-4; F0
r7: R F0<-5; F0
